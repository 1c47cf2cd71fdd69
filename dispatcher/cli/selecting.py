"""The arguments and options that select failed and held emails."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dispatcher.config.plugins import provider_names
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status

if TYPE_CHECKING:
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection

T = TypeVar("T")

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


class Age(click.ParamType[float]):
    """A length of time such as `90s`, `15m`, `2h`, `3d`, `1w`, in seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        found = _AGE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no length of time: write 90s, 15m, 2h, 3d or 1w.", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


class ProviderName(click.ParamType[str]):
    """A provider's word; which packages bring providers is looked up only where one is given."""

    name = "provider"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word."""
        return str(click.Choice(provider_names()).convert(value, param, ctx))


class Words(click.ParamType[str]):
    """A text that is not blank: an empty variable in a script must not select everything."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text."""
        if not str(value).strip():
            self.fail("is blank, which would select everything or nothing.", param, ctx)
        return str(value)


# A word that does not exist would select nothing, and look as if all were well: hence the choices.
_OPTIONS: Final = {
    "status": click.option("--status", type=click.Choice(["failed", "held"]), help="Only these; both if not said."),
    "error_type": click.option(
        "--error-type",
        type=click.Choice([reason.value for reason in Reason]),
        metavar="WORD",
        help="Such as rejected_recipient; `dlq list --by error_type` counts.",
    ),
    "provider": click.option("--provider", type=ProviderName(), metavar="NAME", help="Whom the last attempt went to."),
    "tenant_id": click.option(
        "--tenant",
        "tenant_id",
        type=Words(),
        metavar="ID",
        help="Only this tenant's. With message keys: whose they are; `default` if not said.",
    ),
    "text": click.option("--text", type=Words(), metavar="WORDS", help="Part of the error's words, in any case."),
    "older_than": click.option(
        "--older-than", type=Age(), metavar="AGE", help="Enqueued longer ago: 90s, 15m, 2h, 3d, 1w."
    ),
    "newer_than": click.option("--newer-than", type=Age(), metavar="AGE", help="Enqueued since then."),
    "discarded": click.option(
        "--discarded", is_flag=True, help="Those whose dead letter was discarded, and no others."
    ),
}
"""By the parameter's name."""
DEFAULT_TENANT: Final = "default"


def selecting(**fixed: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The filter's options, passed on as one `selection`.

    Args:
        fixed: Parameters that have a value instead of an option.
    """

    def with_options(command: Callable[..., T]) -> Callable[..., T]:
        asked = [name for name in _OPTIONS if name not in fixed]

        @wraps(command)
        def passed_on(**given: Any) -> T:
            from dispatcher.store.failures import Selection

            values = fixed | {name: given.pop(name) for name in asked}
            status, older_than, newer_than = (values.pop(name) for name in ("status", "older_than", "newer_than"))
            selection = Selection(
                status=Status(status) if status else None,
                older_than_seconds=older_than,
                newer_than_seconds=newer_than,
                **values,
            )
            return command(selection=selection, **given)

        for name in reversed(asked):
            passed_on = _OPTIONS[name](passed_on)
        return passed_on

    return with_options


selecting_held: Final = selecting(status="held", discarded=None)
"""Held emails only, including those whose dead letter was discarded."""


def filters_of(selection: Selection) -> set[str]:
    """The filters that the operator gave."""
    is_of_held = selection.status is Status.HELD and selection.discarded is None
    return selection.filters.keys() - ({"status"} if is_of_held else set())


def check_choice(names: Sequence[str], selection: Selection, which: str, *, is_chosen: bool = False) -> None:
    """Refuses names together with a filter, and neither. With names, a tenant is no filter: it is whose they are.

    Args:
        which: The ways to choose, for the error.
        is_chosen: Whether emails are chosen by another way.

    Raises:
        UsageError: both were given, or neither.
    """
    filters = filters_of(selection)
    if names and filters - {"tenant_id"}:
        raise click.UsageError("Give ids and message keys, or a filter, not both.")
    if not (names or filters or is_chosen):
        raise click.UsageError(f"Which ones? Give {which}.")


async def named(session: AsyncSession, selection: Selection, names: Sequence[str]) -> Selection:
    """A selection of the emails with these names, discarded ones included; without names, `selection` itself.

    Args:
        names: Ids and message keys.

    Raises:
        DispatcherError: a name is no id, and no email has it as its message key.
    """
    if not names:
        return selection
    from dispatcher.ops.names import find_ids
    from dispatcher.store.failures import Selection

    ids = await find_ids(session, selection.tenant_id or DEFAULT_TENANT, names)
    return Selection(email_ids=ids, discarded=None)
