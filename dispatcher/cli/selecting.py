"""The options by which a command says which failed and held emails it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dispatcher.cli.acting import Duration
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.setting_values import KNOWN_PROVIDERS

if TYPE_CHECKING:
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


def selecting(command: Callable[..., Result]) -> Callable[..., Result]:
    """The filter's options, handed on as one `selection`."""

    @wraps(command)
    def handed_on(
        status: str | None,
        error_type: str | None,
        provider: str | None,
        tenant_id: str | None,
        text: str | None,
        older_than: float | None,
        newer_than: float | None,
        discarded: bool,
        **others: Any,
    ) -> Result:
        from dispatcher.store.failures import Selection

        selection = Selection(
            status=Status(status) if status else None,
            error_type=error_type,
            provider=provider,
            tenant_id=tenant_id,
            text=text,
            older_than_seconds=older_than,
            newer_than_seconds=newer_than,
            discarded=discarded,
        )
        return command(selection=selection, **others)

    for option in reversed(_OPTIONS):
        handed_on = option(handed_on)
    return handed_on


PROVIDER: Final = Known("provider", KNOWN_PROVIDERS)
_OPTIONS: Final = (
    click.option("--status", type=click.Choice(["failed", "held"]), help="Only these; both if not said."),
    click.option(
        "--error-type",
        type=Known("error type", Reason),
        metavar="WORD",
        help="Such as rejected_recipient; `dlq list --by error_type` counts.",
    ),
    click.option("--provider", type=PROVIDER, metavar="NAME", help="Whom the last attempt went to."),
    click.option("--tenant", "tenant_id", metavar="ID", help="Only this tenant's."),
    click.option("--text", metavar="WORDS", help="Part of the error's words, in any case."),
    click.option("--older-than", type=Duration(), metavar="AGE", help="Enqueued longer ago: 90s, 15m, 2h, 3d, 1w."),
    click.option("--newer-than", type=Duration(), metavar="AGE", help="Enqueued since then."),
    click.option("--discarded", is_flag=True, help="Those whose dead letter was discarded, and no others."),
)


def all_of(selection: Selection, email_ids: tuple[Any, ...]) -> Selection:
    """The selection of these ids, whatever became of their dead letters; or as it is, if there are none."""
    from dataclasses import replace

    return replace(selection, email_ids=email_ids, discarded=None) if email_ids else selection
