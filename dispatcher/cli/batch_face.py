"""Derives commands from actions on many emails (see `dispatcher.actions.batch`)."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final
from uuid import UUID

import click

from dispatcher.actions.action import Mistakes, read
from dispatcher.actions.batch import Batch, Group, Judged
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.face import group, help_of, option, words_of
from dispatcher.cli.options import confirm, known_lane, progress
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.config import Settings

DEFAULT_TENANT: Final = "default"
_MAX_LISTED: Final = 20
"""The most results that are printed one per line. If there are more, the output is a count for each kind of result."""


def command_of(subject: ModuleType, name: str) -> click.Command:
    """The command of a subject: a group, or the command of the action with this name."""
    batches = {each.name: each for each in subject.ACTIONS if issubclass(each, Batch)}
    return batch_command(batches[name]) if name in batches else group(subject)


def batch_command(action: type[Batch]) -> click.Command:
    """The command of an action: names, the filter, `--all`, `--dry-run`, `--yes`."""
    parameters: list[click.Parameter] = [click.Argument(["names"], metavar="[ID|KEY...]", nargs=-1)]
    parameters += [option(action, each) for name, each in action.fields.items() if name != "email_ids"]
    about = "With a filter or --all: do not ask for confirmation. Required without a terminal."
    parameters += [
        click.Option(["--actor"], metavar="NAME", help="The operator's name for the audit log."),
        click.Option(["--yes"], is_flag=True, help=about),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one line of JSON: the counts, and what failed."),
    ]

    def callback(names: tuple[str, ...], actor: str | None, *, yes: bool, as_json: bool, **given: Any) -> int:
        return _run(_read(action, names, given), names, actor, yes=yes, as_json=as_json)

    help_text = help_of(inspect.getdoc(action) or "", action.examples)
    return click.Command(action.verb(), params=parameters, callback=callback, help=help_text)


def _read(action: type[Batch], names: tuple[str, ...], given: dict[str, Any]) -> Batch:
    texts = {name: text if isinstance(text, str) else "true" for name, text in given.items() if text}
    try:
        if any(not text.strip() for text in given.values() if isinstance(text, str)):
            raise click.UsageError("An option is blank.")
        asked = read(action, {}, texts)
    except Mistakes as error:
        raise click.UsageError("\n".join(words_of(action, each) for each in error.mistakes)) from None
    if names and asked.is_selecting():
        raise click.UsageError("Give ids and message keys, or a filter, not both.")
    if not (names or asked.is_selecting() or asked.tenant_id):
        raise click.UsageError("No emails are selected. Give ids or message keys, a filter such as --lane, or --all.")
    if not (asked.reason or asked.dry_run):
        raise click.UsageError("--reason is missing. Give a few words for the audit log. (--dry-run needs no reason.)")
    return asked


def _run(asked: Batch, names: tuple[str, ...], actor: str | None, *, yes: bool, as_json: bool) -> int:
    from dispatcher.actions.runner import Who, run_batch

    verb, settings = asked.verb(), load_settings("database_url")
    groups, ids = _find(asked, names, settings)
    lane = getattr(asked, "lane", None)
    if not ids and lane is not None:
        known_lane(lane, "--lane")  # only now: a lane that was removed from the settings can still have emails
    if asked.dry_run or not names:
        _show(asked, groups, len(ids), as_json=as_json and asked.dry_run)
    if asked.dry_run or not ids:
        return Exit.DONE
    if not names:
        confirm(f"{verb.capitalize()} {counted(len(ids), 'email')}?", yes=yes)

    async def change(session: Any) -> list[Judged]:
        results: list[Judged] = []
        with progress(verb, total=len(ids)) as advance:
            async for batch in run_batch(session, _of_all_tenants(asked), Who(actor), ids):
                results += batch
                for _ in batch:
                    advance()
        return results

    return _report(asked, run_with_session(verb, change, settings), as_json=as_json)


def _of_all_tenants(asked: Batch) -> Batch:
    return type(asked)(**{**asked.values(), "tenant_id": None})


def _find(asked: Batch, names: tuple[str, ...], settings: Settings) -> tuple[list[Group], Sequence[UUID]]:
    from dispatcher.actions.runner import preview, select
    from dispatcher.ops.names import find_ids

    async def find(session: Any) -> tuple[list[Group], Sequence[UUID]]:
        ids: Sequence[UUID]
        if names:
            ids = await find_ids(session, asked.tenant_id or DEFAULT_TENANT, names)
        else:
            ids = await select(session, asked)
        of = type(asked)(**{**_of_all_tenants(asked).values(), "email_ids": tuple(ids)})
        return await preview(session, of), ids

    return run_with_session(asked.verb(), find, settings)


def _show(asked: Batch, groups: list[Group], selected: int, *, as_json: bool) -> None:
    others = selected - sum(each.emails for each in groups)
    if as_json:
        emails, samples = {g.status: g.emails for g in groups}, {g.status: g.ids for g in groups}
        print_json({"emails": emails, "samples": samples, "others": others})
        return
    for each in groups:
        say(f"{counted(each.emails, 'email')}: {each.status}. For example {', '.join(map(str, each.ids))}")
    if others:
        say(f"{counted(others, 'email')}: has another status. The command does not change them.")
    if not selected:
        say(asked.none_selected)


def _report(asked: Batch, results: list[Judged], *, as_json: bool) -> int:
    unchanged = [each for each in results if not asked.verdict(each.verdict).is_success]
    if as_json:
        listed = {str(each.email_id): {"result": each.verdict, "status": each.status} for each in unchanged}
        print_json({"counts": Counter(each.verdict for each in results), "unchanged": listed})
    texts = [asked.verdict(each.verdict).words.format(status=each.status) for each in results]
    if len(results) <= _MAX_LISTED:
        for each, text in zip(results, texts, strict=True):
            say(f"{each.email_id}: {text}")
    else:
        for text, number in Counter(texts).items():
            say(f"{counted(number, 'email')}: {text}")
    if not unchanged:
        return Exit.DONE
    return Exit.PARTLY if len(unchanged) < len(results) else Exit.FAILED
