"""What the commands that change something share: actor, reason, confirmation, ages, and open connections."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dispatcher.cli.output import say

if TYPE_CHECKING:
    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.config import Settings
    from dispatcher.store.connections import AsyncSession

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


class Duration(click.ParamType[float]):
    """A length of time such as `90s`, `15m`, `2h`, `3d`, `1w`, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, float):
            return value
        found = _DURATION.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no length of time: write 90s, 15m, 2h, 3d or 1w.", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


def acting(command: Command) -> Command:
    """`--reason` and `--actor`."""
    command = click.option(
        "--actor", metavar="NAME", help="Who decides, for the audit; the system's user@host if not said."
    )(command)
    return click.option(
        "--reason", required=True, metavar="TEXT", help="Why, for the audit: a few words, no addresses."
    )(command)


def agreed(question: str) -> bool:
    """Asks for confirmation on the terminal. Without a terminal, returns False and names --yes."""
    if is_terminal():
        return click.confirm(question, err=True)
    say("Nothing was changed: there is no terminal to ask on. Add --yes to go on without being asked.")
    return False


def is_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


@asynccontextmanager
async def opened_session(settings: Settings, name: str) -> AsyncIterator[AsyncSession]:
    """A session of PostgreSQL for one command."""
    from dispatcher.store.connections import check_url, connect_async

    check_url(settings.database_url)
    async with await connect_async(settings.database_url, name=f"dispatcher {name}") as session:
        yield session


@asynccontextmanager
async def opened_dlq(settings: Settings, name: str) -> AsyncIterator[DeadLetterQueue]:
    """The DLQ for one command."""
    from dispatcher.broker.connection import open_connection
    from dispatcher.broker.dlq import DeadLetterQueue

    async with await open_connection(
        settings.amqp_url, name=f"dispatcher {name}", ca_file=settings.ca_file
    ) as connection:
        yield DeadLetterQueue(connection, settings.dlq)
