"""Derives commands from actions (see `dispatcher.actions`)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dispatcher.actions.action import Action, Change, Field, Mistake, Mistakes, Page, Paged, cell, document, label, read
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import ACTOR
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table

if TYPE_CHECKING:
    from dispatcher.store.connections import AsyncSession

_OPTIONAL: Final = (
    *("rejected", "bounced_blocked", "bounced_soft", "bounced_hard", "unsubscribed", "clicked", "suppressed", "held"),
    *("opened", "delivered", "complained", "complained_percent_7d", "bounced_percent_7d", "failed_percent_7d"),
    *("sent_7d", "queue", "audit_id", "event_key", "is_domain", "is_letter_due", "has_content", "provider_message_id"),
    *("worker", "started_at", "provider_code", "source_email_id", "correlation_id", "discarded_at", "next_attempt_at"),
    *("recipients", "retries", "given_up", "lag_seconds", "replay_id", "finished_at", "received_at", "doubt"),
    *("attempt_count", "note", "detail", "senders", "expires_at", "created_at", "began_at", "actor", "provider"),
    *("tenant_id", "error", "reason", "outcome", "message_key", "email_id"),
)
"""Columns that a narrow terminal leaves out, the least important first."""
_CSV_ROWS: Final = 1_000
"""The rows that are read at once."""
A = TypeVar("A", bound=Action[Any])


def group(subject: ModuleType, name: str) -> click.Group:
    """The command group with this name of a subject. The module's docstring is its help."""
    actions: list[type[Action[Any]]] = [each for each in subject.ACTIONS if each.name.split()[0] == name]
    examples = [example for action in actions for example in action.examples[:1]]
    found = click.Group(name, help=help_of(inspect.getdoc(subject) or "", examples))
    for action in actions:
        found.add_command(command(action))
        if action.former:
            former = command(action)
            former.hidden = True
            found.add_command(former, action.former)
    return found


def command(action: type[Action[Any]]) -> click.Command:
    """The command of an action: fields in the path are arguments, the others options."""
    arguments = [action.fields[name] for name in action.argument_names()]
    parameters: list[click.Parameter] = [
        click.Argument([each.name], metavar=_metavar(each), required=each.is_required, nargs=-1)
        if each.kind.is_list
        else click.Argument([each.name], metavar=each.kind.metavar, required=each.is_required)
        for each in arguments
    ]
    parameters += [option(action, each) for each in action.fields.values() if each not in arguments]
    if issubclass(action, Change):
        parameters.append(click.Option(["--actor"], metavar="NAME", help=ACTOR))
    parameters.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one line of JSON."))

    def callback(**given: Any) -> int:
        return _run(action, given)

    about = help_of(inspect.getdoc(action) or "", action.examples)
    if not issubclass(action, Paged):
        return click.Command(action.verb(), params=parameters, callback=callback, help=about)
    parameters.append(click.Option(["--csv", "as_csv"], is_flag=True, help="Print all rows as CSV, page after page."))
    found = _PagedCommand(action.verb(), params=parameters, callback=callback, help=about)
    found.action = action
    return found


class _PagedCommand(click.Command):
    """A command that lists rows in pages, or with `--csv` all of them."""

    action: type[Paged[Any]]

    def invoke(self, ctx: click.Context) -> Any:
        return print_csv(self.action, ctx.params) if ctx.params.pop("as_csv") else super().invoke(ctx)


def print_csv(action: type[Paged[Any]], given: dict[str, Any]) -> int:
    """Prints all rows that the options select."""
    del given["as_json"]
    asked = read_options(action, given).but(limit=_CSV_ROWS)
    from dispatcher.actions.runner import Face, Who, run
    from dispatcher.ops.csv_text import csv_text

    settings, names = load_settings("database_url"), action.row.__match_args__

    async def print_pages(session: AsyncSession) -> None:
        page = await run(session, asked, Who(Face.COMMAND), settings)
        is_read = print_data(csv_text(names, page.rows).rstrip())
        while is_read and page.next is not None:
            page = await run(session, asked.but(after=page.next), Who(Face.COMMAND), settings)
            if page.rows:
                is_read = print_data(csv_text(names, page.rows, has_head=False).rstrip())

    with in_words(action):
        run_with_session(action.noun(), print_pages, settings)
    return Exit.DONE


def _metavar(field: Field) -> str:
    return f"{field.kind.metavar}..." if field.is_required else f"[{field.kind.metavar}...]"


def option(action: type[Action[Any]], field: Field) -> click.Option:
    """The option of a field; its value stays text, so that all mistakes are reported at once."""
    if field.kind.is_flag:
        return click.Option([field.flag, field.name], is_flag=True, help=field.about)
    is_required = field.is_required or (field.name == "reason" and issubclass(action, Change) and action.needs_reason)
    kind = click.Choice(list(field.kind.choices)) if field.kind.choices else click.STRING
    metavar = None if field.kind.choices else field.kind.metavar
    return click.Option(
        [field.flag, field.name],
        type=kind,
        metavar=metavar,
        help=field.help + (" Repeatable." if field.kind.has_lines else ""),
        required=is_required,
        multiple=field.kind.has_lines,
    )


def help_of(about: str, examples: Iterable[str]) -> str:
    """The help of a command: the docstring, with the examples after its first paragraph."""
    first, _, rest = about.partition("\n\n")
    shown = "\n".join(f"  dispatcher {each}" for each in examples)
    return f"{first}\n\n\b\nExamples:\n{shown}\n\n{rest}" if shown else about


def _run(action: type[Action[Any]], given: dict[str, Any]) -> int:
    as_json, actor = given.pop("as_json"), given.pop("actor", None)
    asked = read_options(action, given)
    from dispatcher.actions.runner import Face, Who, run

    settings = load_settings("database_url")

    async def act(session: AsyncSession) -> tuple[Any, str]:
        found = await run(session, asked, Who(Face.COMMAND, actor), settings)
        is_empty = action.is_list and not (found.rows if isinstance(found, Page) else found)
        return found, await asked.none_found(session) if is_empty else ""

    with in_words(action):
        asked.check(settings)  # before the connection
        result, nothing = run_with_session(action.noun(), act, settings)
    if as_json:
        print_json(document(action, result))
    elif action.is_list or not issubclass(action, Change):
        _show(action, result if action.is_list else [result], nothing)
    else:
        if action.secret:
            print_data(getattr(result, action.secret))
        if action.tells_row:
            say(result.describe().rstrip(".") + ".")
        say(action.done)
    return Exit.DONE


def read_options(action: type[A], given: Mapping[str, Any]) -> A:
    """The action that the options say; a usage error with all mistakes of the command line."""
    given = {name: text for name, text in given.items() if text not in (None, False, ())}
    lists = {
        name: [item for each in given.pop(name) for item in action.fields[name].kind.parse(each)]
        for name, each in action.fields.items()
        if name in given and each.kind.is_list and isinstance(given[name], tuple)
    }
    texts = {name: "\n".join(each) if isinstance(each, tuple) else each for name, each in given.items()}
    with in_words(action):
        return read(action, lists, {name: "true" if text is True else text for name, text in texts.items()})


@contextmanager
def in_words(action: type[Action[Any]]) -> Iterator[None]:
    """Translates mistakes to a usage error in the words of the command line."""
    try:
        yield
    except Mistakes as error:
        raise click.UsageError("\n".join(words_of(action, each) for each in error.mistakes)) from None


def _show(action: type[Action[Any]], result: Any, nothing: str) -> None:
    rows = result.rows if isinstance(result, Page) else result
    if rows:
        _table(action, rows).show()
    else:
        say(nothing)
    if isinstance(result, Page) and result.next is not None:
        say(f"More rows follow. Add --after {result.next}")


def words_of(action: type[Action[Any]], mistake: Mistake) -> str:
    if not mistake.field:
        rule = mistake.rule
        for name, each in action.fields.items():
            rule = re.sub(rf"\b{name}\b", each.flag, rule)
        return f"The command line {rule}."
    name = mistake.field
    shown = action.fields[name].kind.metavar if name in action.argument_names() else action.fields[name].flag
    place = f" (item {int(mistake.path) + 1})" if mistake.path.isdigit() else ""
    return f"Invalid value for '{shown}'{place}: it {mistake.rule}."


def _table(action: type[Action[Any]], rows: list[Any]) -> Table:
    names = action.row.__match_args__
    numbers = [at for at, name in enumerate(names) if isinstance(getattr(rows[0], name), (int, float))]
    optional = (label(name).lower() for name in _OPTIONAL)
    shown = Table(*(label(name).lower() for name in names), right=numbers, optional=optional)
    for row in rows:
        shown.add(*(cell(action, name, getattr(row, name)) for name in names))
    return shown
