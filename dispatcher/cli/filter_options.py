"""The types of options' values, and the options of an action for a command that is written by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dispatcher.actions.action import Action, Mistakes, read
from dispatcher.cli.face import option, words_of
from dispatcher.config.plugins import provider_names
from dispatcher.domain.failures import Selection
from dispatcher.domain.instant import parse_length
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.store.connections import AsyncSession

A = TypeVar("A", bound=Action[Any])
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


DEFAULT_TENANT: Final = "default"


def filter_options(action: type[A], *left_out: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator that adds the options of an action's fields to a command. The command gets the action as `asked`.

    Args:
        left_out: Fields that have no option.
    """
    shown = [each for name, each in action.fields.items() if name not in left_out]

    def with_options(command: Callable[..., T]) -> Callable[..., T]:
        @wraps(command)
        def with_asked(**given: Any) -> T:
            texts = {each.name: given.pop(each.name) for each in shown}
            return command(asked=_asked(action, texts), **given)

        parameters = getattr(command, "__click_params__", [])
        with_asked.__click_params__ = [*parameters, *(option(action, each) for each in reversed(shown))]  # type: ignore[attr-defined]
        return with_asked

    return with_options


def _asked(action: type[A], given: Mapping[str, Any]) -> A:
    if any(isinstance(text, str) and not text.strip() for text in given.values()):
        raise click.UsageError("An option is blank.")  # a script's empty variable would select every email
    try:
        return read(
            action, {}, {name: text if isinstance(text, str) else "true" for name, text in given.items() if text}
        )
    except Mistakes as error:
        raise click.UsageError("\n".join(words_of(action, each) for each in error.mistakes)) from None


def require_names_or_filter(
    names: Sequence[str], filters: Collection[str], ways: str, *, is_chosen: bool = False
) -> None:
    """Checks that the command line selects emails by names (ids or message keys) or by a filter, not by both.

    If the command line has names, `--tenant` is not a filter: it says which tenant the message keys belong to.

    Args:
        filters: The fields of the filter that the command line sets.
        ways: The ways to select emails, for the error message.
        is_chosen: Whether a different option, such as `--all`, already selects emails.

    Raises:
        UsageError: both were given, or nothing selects emails.
    """
    if names and set(filters) - {"tenant_id"}:
        raise click.UsageError("Give ids and message keys, or a filter, not both.")
    if not (names or filters or is_chosen):
        raise click.UsageError(f"No emails are selected. Give {ways}.")


async def select_by_names(session: AsyncSession, selection: Selection, names: Sequence[str]) -> Selection:
    """A selection of the emails with these ids and message keys, discarded or not; `selection` itself without names.

    Raises:
        DispatcherError: one of `names` is neither an id nor the message key of an email.
    """
    if not names:
        return selection
    from dispatcher.ops.names import find_ids

    ids = await find_ids(session, selection.tenant_id or DEFAULT_TENANT, names)
    return Selection(email_ids=ids, discarded=None)
