"""What commands share that read or change many emails: the open servers, who acts and why, confirmation, progress."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import say

if TYPE_CHECKING:
    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.config import Settings
    from dispatcher.store.connections import AsyncSession

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


def acting(
    *,
    is_required: bool = True,
    reason: str = "Why, for the audit: a few words, no addresses.",
    actor: str = "Who decides, for the audit; the system's user@host if not said.",
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The options `--reason` and `--actor`, passed on as one `act`; None without a reason that is not required.

    Args:
        reason: The help of `--reason`.
        actor: The help of `--actor`.
    """

    def with_options(command: Callable[..., T]) -> Callable[..., T]:
        @wraps(command)
        def passed_on(reason: str | None, actor: str | None, **given: Any) -> T:
            if not (is_required or reason):
                return command(act=None, **given)
            from dispatcher.ops.acts import Act

            return command(act=Act.of(actor, reason or ""), **given)

        passed_on = click.option("--actor", metavar="NAME", help=actor)(passed_on)
        return click.option("--reason", required=is_required, metavar="TEXT", help=reason)(passed_on)

    return with_options


def json_option(words: str = "One line of JSON.") -> Callable[[Command], Command]:
    """The option `--json`, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=words)


def confirm(question: str, *, yes: bool) -> None:
    """Asks on the terminal, unless `--yes` was given.

    Raises:
        Exit: with 0 if the answer is no, with 2 if there is no terminal.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say("Nothing was changed: there is no terminal to ask on. Add --yes to go on without being asked.")
        raise click.exceptions.Exit(Exit.USAGE)
    if not click.confirm(question, err=True):
        raise click.exceptions.Exit(Exit.DONE)


@contextmanager
def progress(label: str, *, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal; yields a function that advances it by one."""
    with click.progressbar(
        length=total, label=label, show_pos=True, file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        bar.update(done)
        yield lambda: bar.update(1)


def in_session(name: str, work: Callable[[AsyncSession], Awaitable[T]], settings: Settings | None = None) -> T:
    """Runs work that needs PostgreSQL alone, for the command of this name.

    Args:
        settings: Loaded now if not given.
    """
    found = settings or load_settings("database_url")

    async def run() -> T:
        async with opened_session(found, name) as session:
            return await work(session)

    return asyncio.run(run())


def at_dlq(
    name: str, work: Callable[[AsyncSession, DeadLetterQueue], Awaitable[T]], settings: Settings | None = None
) -> T:
    """Runs work that needs PostgreSQL and the DLQ, for the command of this name."""
    found = settings or load_settings("database_url", "amqp_url")

    async def run() -> T:
        async with opened_session(found, name) as session, opened_dlq(found, name) as dlq:
            return await work(session, dlq)

    return asyncio.run(run())


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
