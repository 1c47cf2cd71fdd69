"""The command-line options that select failed and held emails, and emails that are not sent yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dispatcher.config.plugins import provider_names
from dispatcher.domain.instant import parse_length
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection

T = TypeVar("T")


class Age(click.ParamType[float]):
    """An option's value: a length of time such as `90s`, `15m`, `2h`, `3d` or `1w`, which is converted to seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The length in seconds."""
        try:
            return parse_length(str(value))
        except ValueError as error:
            self.fail(f"{value!r} {error}.", param, ctx)


class AgeOrOff(Age):
    """Like `Age`, but also accepts `off`, which means 0 seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The length in seconds."""
        return 0.0 if value == "off" else super().convert(value, param, ctx)


class Instant(click.ParamType[datetime]):
    """A date and time with a zone, such as `2026-12-24T18:00:00+01:00`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The instant. Refuses a time without a zone, because such a time is ambiguous."""
        from dispatcher.domain.email_json import instant_of
        from dispatcher.domain.email_rules import instant

        try:
            return instant("time", instant_of("time", value))
        except InvalidEmail as error:
            self.fail(f"{value!r} {error.reason}.", param, ctx)


class ProviderName(click.ParamType[str]):
    """A provider's name. Searches installed packages for providers only if the option is given: this is slow."""

    name = "provider"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name, unchanged; a usage error if there is no such provider."""
        return str(click.Choice(provider_names()).convert(value, param, ctx))


class NonBlankText(click.ParamType[str]):
    """A text that is not blank. Refuses a blank text: a script's empty variable would otherwise select every email."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, unchanged."""
        if not str(value).strip():
            self.fail("the text is blank. Give a text, or omit the option.", param, ctx)
        return str(value)


# Use choices instead of free text. A misspelt value would select nothing, and the output would look as if no email had
# failed.
_OPTIONS: Final = {
    "status": click.option(
        "--status", type=click.Choice(["failed", "held"]), help="Only this status.  [default: both]"
    ),
    "error_type": click.option(
        "--error-type",
        type=click.Choice([reason.value for reason in Reason]),
        metavar="TYPE",
        help="Only this error type, such as outcome_unknown. `dlq list --by error_type` shows the types.",
    ),
    "provider": click.option(
        "--provider", type=ProviderName(), metavar="NAME", help="Only emails whose last attempt used this provider."
    ),
    "tenant_id": click.option(
        "--tenant", "tenant_id", type=NonBlankText(), metavar="ID", help="Only this tenant.  [default: all]"
    ),
    "text": click.option(
        "--text",
        type=NonBlankText(),
        metavar="TEXT",
        help="Only emails whose last error contains this text; case does not matter.",
    ),
    "older_than": click.option(
        "--older-than",
        type=Age(),
        metavar="AGE",
        help="Only emails enqueued more than AGE ago, such as 90s, 15m, 2h, 3d or 1w.",
    ),
    "newer_than": click.option(
        "--newer-than",
        type=Age(),
        metavar="AGE",
        help="Only emails enqueued less than AGE ago, such as 90s, 15m, 2h, 3d or 1w.",
    ),
    "tag": click.option(
        "--tag",
        type=NonBlankText(),
        metavar="TAG",
        help="Only emails with this tag. Emails whose content was deleted are not found.",
    ),
    "channel": click.option("--channel", type=NonBlankText(), metavar="NAME", help="Only this channel: email or sms."),
    "discarded": click.option(
        "--discarded",
        is_flag=True,
        help="Only emails whose dead letter was already discarded. Without this option, such emails are left out.",
    ),
}
"""The filter options, each by the name of the parameter that click passes to the command."""
_FIELDS: Final = {"older_than": "older_than_seconds", "newer_than": "newer_than_seconds"}
"""Maps the parameter of an option to the field of the filter, where their names differ."""
DEFAULT_TENANT: Final = "default"
_TENANT_OR_KEYS: Final = click.option(
    "--tenant",
    "tenant_id",
    type=NonBlankText(),
    metavar="ID",
    help="With a filter: only this tenant (default: all tenants). With message keys: the tenant of the keys (default: "
    "`default`).",
)


def filter_options(*, takes_keys: bool = True, **fixed: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator that adds the filter options to a command. The command gets the filter as one parameter, `selection`.

    Args:
        takes_keys: Whether the command also accepts message keys. With keys, `--tenant` is the tenant of these keys.
        fixed: Filter parameters, such as `status`, for which the command sets the value and has no option.
    """
    options = _OPTIONS | ({"tenant_id": _TENANT_OR_KEYS} if takes_keys else {})

    def select(values: dict[str, Any]) -> Selection:
        from dispatcher.store.failures import Selection

        return Selection(**(fixed | values))

    return _with_options({name: option for name, option in options.items() if name not in fixed}, select)


def _with_options(
    options: dict[str, Callable[..., Any]], select: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    def with_options(command: Callable[..., T]) -> Callable[..., T]:
        @wraps(command)
        def with_selection(**arguments: Any) -> T:
            values = {_FIELDS.get(name, name): arguments.pop(name) for name in options}
            if values.get("status") is not None:
                values["status"] = Status(values["status"])
            return command(selection=select(values), **arguments)

        for option in reversed(options.values()):
            with_selection = option(with_selection)
        return with_selection

    return with_options


def held_filter_options(*, takes_keys: bool) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Like `filter_options`, for held emails only, including those whose dead letter was discarded."""
    return filter_options(takes_keys=takes_keys, status=Status.HELD, discarded=None)


def filters_of(selection: Selection) -> set[str]:
    """The names of the filters that the command line sets."""
    is_of_held = selection.status is Status.HELD and getattr(selection, "discarded", None) is None
    return selection.filters.keys() - ({"status"} if is_of_held else set())


def require_names_or_filter(names: Sequence[str], selection: Selection, ways: str, *, is_chosen: bool = False) -> None:
    """Checks that the command line selects emails by names (ids or message keys) or by a filter, not by both.

    If the command line has names, `--tenant` is not a filter: it says which tenant the message keys belong to.

    Args:
        ways: The ways to select emails, for the error message.
        is_chosen: Whether a different option, such as `--all`, already selects emails.

    Raises:
        UsageError: both were given, or nothing selects emails.
    """
    filters = filters_of(selection)
    if names and filters - {"tenant_id"}:
        raise click.UsageError("Give ids and message keys, or a filter, not both.")
    if not (names or filters or is_chosen):
        raise click.UsageError(f"No emails are selected. Give {ways}.")


async def select_by_names(session: AsyncSession, selection: Selection, names: Sequence[str]) -> Selection:
    """A selection of the emails with these ids and message keys; `selection` itself if `names` is empty.

    Includes emails whose dead letter was discarded.

    Args:
        names: Ids and message keys.

    Raises:
        DispatcherError: one of `names` is neither an id nor the message key of an email.
    """
    if not names:
        return selection
    from dispatcher.ops.names import find_ids
    from dispatcher.store.failures import Selection

    ids = await find_ids(session, selection.tenant_id or DEFAULT_TENANT, names)
    return Selection(email_ids=ids, discarded=None)
