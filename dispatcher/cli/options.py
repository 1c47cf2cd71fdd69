"""Options and questions that several commands share: times, reason and actor, `--json`, confirmation, progress."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import wraps
from typing import Any, Final, TypeVar

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.output import say
from dispatcher.domain.instant import parse_length
from dispatcher.errors import InvalidEmail

ACTOR: Final = "The operator's name for the audit log.  [default: the system's user@host]"
T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


class Age(click.ParamType[float]):
    """An option's value: a length of time such as `90s`, `15m`, `2h`, `3d` or `1w`, which is converted to seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_length(str(value))
        except ValueError as error:
            self.fail(f"{value!r} {error}.", param, ctx)


class Instant(click.ParamType[datetime]):
    """A date and time with a zone, such as `2026-12-24T18:00:00+01:00`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        from dispatcher.domain.email_json import instant_of
        from dispatcher.domain.email_rules import instant

        try:
            return instant("time", instant_of("time", value))
        except InvalidEmail as error:
            self.fail(f"{value!r} {error.reason}.", param, ctx)


class Number(click.FloatRange):
    """A finite number within a range. Click's own range accepts NaN, because every comparison with NaN is false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with suppress(click.BadParameter):
            if math.isfinite(found := float(super().convert(value, param, ctx))):
                return found
        return self.fail(f"{value!r} is not a number from {self.min:g} to {self.max:,g}, such as 2.5.", param, ctx)


def audit_options(
    *,
    is_required: bool = True,
    reason: str = "The reason, for the audit log: a few words, without addresses.",
    actor: str = ACTOR,
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator that adds `--reason` and `--actor` to a command. The command gets both as one parameter, `act`: None
    if `--reason` is optional and missing. `reason` and `actor` are the options' help."""

    def with_options(command: Callable[..., T]) -> Callable[..., T]:
        @wraps(command)
        def with_act(reason: str | None, actor: str | None, **arguments: Any) -> T:
            if not (is_required or reason):
                return command(act=None, **arguments)
            from dispatcher.ops.acts import Act

            return command(act=Act.of(actor, reason or ""), **arguments)

        with_act = click.option("--actor", metavar="NAME", help=actor)(with_act)
        return click.option("--reason", required=is_required, metavar="TEXT", help=reason)(with_act)

    return with_options


def json_option(about: str = "Print one line of JSON.") -> Callable[[Command], Command]:
    """A decorator that adds `--json` to a command. The command gets the option as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=about)


def known_lane(lane: str | None, option: str) -> str | None:
    """The lane unchanged; a usage error about the option if DISPATCHER_LANES does not contain it."""
    from dispatcher.cli.environment import load_settings

    lanes = load_settings().lanes
    if lane is not None and lane not in lanes:
        raise click.UsageError(f"{option}: there is no lane {lane!r}. DISPATCHER_LANES has: {', '.join(lanes)}.")
    return lane


def confirm(question: str, *, yes: bool) -> None:
    """Asks the operator on the terminal, unless `yes` is true. Exits with 0 if the answer is no, with 2 if stdin or
    stderr is not a terminal."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say("Nothing was changed: this command asks for confirmation, and there is no terminal. Add --yes.")
        raise click.exceptions.Exit(Exit.USAGE)
    if not click.confirm(question, err=True):
        raise click.exceptions.Exit(Exit.DONE)


@contextmanager
def progress(label: str, *, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """Shows a progress bar if stderr is a terminal. Yields a function that advances the bar by one."""
    with click.progressbar(
        length=total, label=label, show_pos=True, file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as bar:
        bar.update(done)
        yield lambda: bar.update(1)
