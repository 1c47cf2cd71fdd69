"""Derives commands from actions on many emails (see `dispatcher.actions.batch`)."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final
from uuid import UUID

import click

from dispatcher.actions.batch import Batch, Group, Judged
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.face import command, group, help_of, in_words, option, read_options
from dispatcher.cli.options import ACTOR, confirm, known_lane, progress
from dispatcher.cli.output import counted, examples, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.config import Settings
from dispatcher.domain.text import DEFAULT_TENANT

_MAX_LISTED: Final = 20
"""The most results that are printed one per line. If there are more, the output is a count for each kind of result."""


def command_of(subject: ModuleType, name: str) -> click.Command:
    batches = {each.name: each for each in subject.ACTIONS if issubclass(each, Batch)}
    if name in batches:
        return batch_command(batches[name])
    if single := next((each for each in subject.ACTIONS if each.name == name), None):
        return command(single)
    found = group(subject, name)
    for each in batches.values():
        found.add_command(batch_command(each))
    return found


def batch_command(action: type[Batch]) -> click.Command:
    """The command of an action: names, the filter, `--all`, `--dry-run`, `--yes`."""
    parameters: list[click.Parameter] = [click.Argument(["names"], metavar="[ID|KEY...]", nargs=-1)]
    parameters += [option(action, each) for name, each in action.fields.items() if name != "email_ids"]
    about = "With a filter or --all: do not ask for confirmation. Required without a terminal."
    parameters += [
        click.Option(["--actor"], metavar="NAME", help=ACTOR),
        click.Option(["--yes"], is_flag=True, help=about),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one line of JSON: the counts, and what failed."),
    ]

    def callback(names: tuple[str, ...], actor: str | None, *, yes: bool, as_json: bool, **given: Any) -> int:
        return _run(_read(action, names, given), names, actor, yes=yes, as_json=as_json)

    help_text = help_of(inspect.getdoc(action) or "", action.examples)
    return click.Command(action.verb(), params=parameters, callback=callback, help=help_text)


def _read(action: type[Batch], names: tuple[str, ...], given: dict[str, Any]) -> Batch:
    asked = read_options(action, given)
    if names and asked.is_selecting():
        raise click.UsageError("Give ids and message keys, or a filter, not both.")
    if not (names or asked.is_selecting() or asked.tenant_id):
        raise click.UsageError("No emails are selected. Give ids or message keys, a filter such as --lane, or --all.")
    if not (asked.reason or asked.dry_run):
        raise click.UsageError("--reason is missing. Give a few words for the audit log. (--dry-run needs no reason.)")
    return asked


def _run(asked: Batch, names: tuple[str, ...], actor: str | None, *, yes: bool, as_json: bool) -> int:
    from dispatcher.actions.runner import Face, Who, run_batch

    verb, settings = asked.verb(), load_settings("database_url")
    groups, ids = _find(asked, names, settings)
    if asked.dry_run or not ids:
        if as_json:
            print_json(asked.outcome(groups, len(ids), []))
        else:
            _show(asked, groups, len(ids))
        return Exit.DONE
    if not names:
        _show(asked, groups, len(ids))
        confirm(f"{verb.capitalize()} {counted(len(ids), 'email')}?", yes=yes)

    async def change(session: Any) -> list[Judged]:
        results: list[Judged] = []
        with progress(verb, total=len(ids)) as advance:
            async for batch in run_batch(session, asked.but(tenant_id=None), Who(Face.COMMAND, actor), ids, settings):
                results += batch
                for _ in batch:
                    advance()
        return results

    with in_words(type(asked)):
        judged = run_with_session(verb, change, settings)
    outcome = asked.outcome(groups, len(ids), judged)
    if as_json:
        print_json(outcome)
    _report(asked, judged)
    if not outcome.unchanged:
        return Exit.DONE
    return Exit.PARTLY if len(outcome.unchanged) < len(judged) else Exit.FAILED


def _find(asked: Batch, names: tuple[str, ...], settings: Settings) -> tuple[list[Group], Sequence[UUID]]:
    from dispatcher.actions.runner import preview, select
    from dispatcher.ops.names import find_ids

    async def find(session: Any) -> tuple[list[Group], Sequence[UUID]]:
        ids: Sequence[UUID]
        if names:
            ids = await find_ids(session, asked.tenant_id or DEFAULT_TENANT, names)
        else:
            ids = await select(session, asked)
        return await preview(session, asked.but(tenant_id=None, email_ids=tuple(ids))), ids

    groups, ids = run_with_session(asked.verb(), find, settings)
    lane = getattr(asked, "lane", None)
    if not ids and lane is not None:
        known_lane(lane, "--lane")  # only now: a lane that was removed from the settings can still have emails
    return groups, ids


def _show(asked: Batch, groups: list[Group], selected: int) -> None:
    for each in groups:
        say(f"{counted(each.emails, 'email')}: {each.status}. For example:{examples(each.ids)}")
    if others := selected - sum(each.emails for each in groups):
        say(f"{counted(others, 'email')}: {asked.others}. The command does not change them.")
    if not selected:
        say(asked.none_selected)


def _report(asked: Batch, judged: list[Judged]) -> None:
    texts = [asked.verdict(each.verdict).words.format(status=each.status) for each in judged]
    if len(judged) <= _MAX_LISTED:
        for each, text in zip(judged, texts, strict=True):
            say(f"{each.email_id}: {text}")
    else:
        for text, number in Counter(texts).items():
            say(f"{counted(number, 'email')}: {text}")
