"""The arguments and options that select failed and held emails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dispatcher.cli.acting import Duration
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.setting_values import KNOWN_PROVIDERS

if TYPE_CHECKING:
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.failures import Selection

Result = TypeVar("Result")


class Known(click.ParamType[str]):
    """One of the words that there are: a typo would select nothing, and look as if all were well."""

    def __init__(self, name: str, words: Iterable[str]) -> None:
        self.name = name
        self._words = tuple(words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word."""
        if value not in self._words:
            self.fail(f"there is no {self.name} {value!r}; there are: {', '.join(self._words)}.", param, ctx)
        return str(value)


class Words(click.ParamType[str]):
    """A text that is not blank: an empty variable in a script must not select everything."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text."""
        if not str(value).strip():
            self.fail("is blank, which would select everything or nothing.", param, ctx)
        return str(value)


def selecting(command: Callable[..., Result]) -> Callable[..., Result]:
    """The filter's options, handed on as one `selection`."""
    return _selecting(command, {})


def selecting_held(command: Callable[..., Result]) -> Callable[..., Result]:
    """As `selecting`, for held emails only, including those whose dead letter was discarded."""
    return _selecting(command, {"status": "held", "discarded": None})


def _selecting(command: Callable[..., Result], fixed: dict[str, Any]) -> Callable[..., Result]:
    asked = [name for name in _OPTIONS if name not in fixed]

    @wraps(command)
    def handed_on(**given: Any) -> Result:
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
        handed_on = _OPTIONS[name](handed_on)
    return handed_on


PROVIDER: Final = Known("provider", KNOWN_PROVIDERS)
_OPTIONS: Final = {
    "status": click.option("--status", type=click.Choice(["failed", "held"]), help="Only these; both if not said."),
    "error_type": click.option(
        "--error-type",
        type=Known("error type", Reason),
        metavar="WORD",
        help="Such as rejected_recipient; `dlq list --by error_type` counts.",
    ),
    "provider": click.option("--provider", type=PROVIDER, metavar="NAME", help="Whom the last attempt went to."),
    "tenant_id": click.option(
        "--tenant",
        "tenant_id",
        type=Words(),
        metavar="ID",
        help="Only this tenant's. With message keys: whose they are; `default` if not said.",
    ),
    "text": click.option("--text", type=Words(), metavar="WORDS", help="Part of the error's words, in any case."),
    "older_than": click.option(
        "--older-than", type=Duration(), metavar="AGE", help="Enqueued longer ago: 90s, 15m, 2h, 3d, 1w."
    ),
    "newer_than": click.option("--newer-than", type=Duration(), metavar="AGE", help="Enqueued since then."),
    "discarded": click.option(
        "--discarded", is_flag=True, help="Those whose dead letter was discarded, and no others."
    ),
}
"""By the parameter's name."""
DEFAULT_TENANT: Final = "default"


def refuse_both(names: Sequence[str], filters: Iterable[str]) -> None:
    """Refuses names together with a filter. A tenant is no filter then: it says whose the message keys are.

    Raises:
        UsageError: both were given.
    """
    if names and set(filters) - {"tenant_id"}:
        raise click.UsageError("Give ids and message keys, or a filter, not both.")


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
