"""`dispatcher suppressions`: the actions' commands, and what commands alone do: look up, replay, import, export."""

from __future__ import annotations

import csv
import inspect
import io
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from dispatcher.actions import suppressions as actions
from dispatcher.actions.dlq import CreateReplay
from dispatcher.cli import face
from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import audit_options, confirm, json_option
from dispatcher.cli.output import counted, examples, print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.domain.suppression import AddedSuppressions, SuppressionReason
from dispatcher.domain.text import DEFAULT_TENANT

if TYPE_CHECKING:
    from uuid import UUID

    from dispatcher.domain.suppression import Suppression
    from dispatcher.ops.acts import Act
    from dispatcher.store.connections import AsyncSession

_EXAMPLES: Final = 5
_REFUSALS_SHOWN: Final = 20
_REPLAY: Final = "repeat this command with --replay"
_REPLAY_IDS: Final = "use `dispatcher dlq replay` with their ids"
_TENANT: Final = face.option(actions.AddSuppressions, actions.AddSuppressions.fields["tenant_id"])
_KIND: Final = face.option(actions.AddSuppressions, actions.AddSuppressions.fields["kind"])
_TOPIC: Final = face.option(actions.AddSuppressions, actions.AddSuppressions.fields["topic"])


def _commands() -> click.Group:
    """The actions' commands: `list` also looks a recipient up, `add` has a dry run, and `remove` can replay."""
    group = face.group(actions, "suppressions")
    list_, add, remove = (group.commands[each.verb()] for each in actions.ACTIONS)
    page, change, look_up = list_.callback, add.callback, face.command(actions.LookUp).callback
    assert page is not None
    assert change is not None
    assert look_up is not None

    def page_or_look_up(recipient: str | None, **given: Any) -> Any:
        if recipient is None:
            return page(**given)
        return look_up(recipient=recipient, tenant_id=given["tenant_id"], as_json=given["as_json"])

    def change_or_check(dry_run: bool, **given: Any) -> Any:
        if not dry_run:
            return change(**given)
        fields = {name: given[name] for name in actions.AddSuppressions.fields}
        asked = face.read_options(actions.AddSuppressions, fields)
        with face.in_words(actions.AddSuppressions):
            asked.check(None)
        say(f"{counted(len(asked.recipients), 'recipient')}. Nothing was changed.")
        return Exit.DONE

    list_.params.insert(0, click.Argument(["recipient"], metavar="[ADDRESS|DOMAIN]", required=False))
    list_.callback = page_or_look_up
    lines = (*actions.ListSuppressions.examples, "suppressions list ann@example.org")
    list_.help = face.help_of(inspect.getdoc(actions.ListSuppressions) or "", lines)
    add.params.append(click.Option(["--dry-run"], is_flag=True, help="Only check the recipients; change nothing."))
    add.callback = change_or_check
    about_replay = "Also send the emails that failed because of the suppression, each once."
    about_dry_run = "Only show the entries, and the emails that failed because of them; change nothing."
    about_yes = "With --replay: do not ask for confirmation; required without a terminal."
    remove.params += [
        click.Option(["--replay"], is_flag=True, help=about_replay),
        face.option(CreateReplay, CreateReplay.fields["per_second"]),
        click.Option(["--dry-run"], is_flag=True, help=about_dry_run),
        click.Option(["--yes"], is_flag=True, help=about_yes),
    ]
    remove.callback = _remove
    (example,) = actions.RemoveSuppressions.examples
    remove.help = face.help_of(inspect.getdoc(_remove) or "", (f"{example} --dry-run", f"{example} --replay --yes"))
    return group


def _remove(
    *, actor: str | None, replay: bool, per_second: str | None, dry_run: bool, yes: bool, as_json: bool, **given: Any
) -> int:
    """Let recipients get emails again.

    Emails that failed because all their recipients were suppressed stay failed. With --replay, the command sends these
    emails like `dispatcher dlq replay`: each once, at a limited rate. The command is safe to repeat.

    Exit codes: 0 done; 1 there was no entry and no email to send; 2 confirmation needs a terminal or --yes; 3 only some
    emails were replayed.
    """
    asked = face.read_options(actions.RemoveSuppressions, given)
    recipients = _recipients_of(asked, is_needed=replay or dry_run)
    rate = face.read_options(CreateReplay, {"per_second": per_second}).per_second
    settings = load_settings("database_url", "amqp_url") if replay else load_settings("database_url")
    from dispatcher.actions.runner import Face, Who, of_tenant, run
    from dispatcher.ops.suppressions import find_stopped, hashes_of

    who = Who(Face.COMMAND, actor)

    async def look(session: AsyncSession) -> tuple[list[Suppression], list[UUID]]:
        entries: dict[int, Suppression] = {}
        tenant_id = of_tenant(asked, who).tenant_id or ""
        for each in recipients:
            found = await run(session, actions.LookUp(recipient=each, tenant_id=tenant_id), who)
            entries |= {entry.id: entry for entry in found}
        hashes = await hashes_of(session, recipients, topic=asked.topic)
        return list(entries.values()), await find_stopped(session, tenant_id, hashes)

    entries, stopped = run_with_session("suppressions", look, settings)
    if dry_run:
        _show_removal([each for each in entries if each.topic == asked.topic], stopped, as_json=as_json)
        return Exit.DONE
    if replay and stopped:
        _say_stopped(stopped)
        confirm(f"Remove the entries, and replay {counted(len(stopped), 'email')}?", yes=yes)
    removed = run_with_session("suppressions", lambda session: run(session, asked, who), settings)
    say(f"Removed {counted(removed.removed, 'suppressed recipient')}.")
    for entry in entries:
        if entry.topic != asked.topic or (entry.is_domain and entry.recipient not in recipients):
            what = f"The domain {entry.recipient}, with all its addresses," if entry.is_domain else entry.recipient
            say(f"{what} is still suppressed for {_emails_of(entry)}.")
    if replay and stopped:
        from dispatcher.cli.dlq_replay import replay_ids
        from dispatcher.ops.acts import Act

        return replay_ids(settings, tuple(stopped), Act.of(actor, asked.reason), rate, as_json=as_json)
    if as_json:
        print_json(removed)
    stopped = stopped or removed.stopped_email_ids
    _say_stopped(stopped)
    if stopped:
        say(f"To send each of them once, {_REPLAY if recipients else _REPLAY_IDS}.")
    return Exit.DONE if removed.removed or stopped else Exit.FAILED


def _recipients_of(asked: actions.RemoveSuppressions, *, is_needed: bool) -> tuple[str, ...]:
    if is_needed and not asked.recipients:
        raise click.UsageError("--replay and --dry-run need addresses or domains, not --id.")
    return asked.recipients or ()


def _show_removal(entries: list[Suppression], stopped: list[UUID], *, as_json: bool) -> None:
    if as_json:
        print_json({"suppressions": [entry.id for entry in entries], "stopped_email_ids": stopped})
        return
    for entry in entries:
        say(f"{entry.recipient}: {entry.kind}, for {_emails_of(entry)}, since {entry.created_at:%Y-%m-%d %H:%M %Z}.")
    if not entries:
        say(actions.LookUp.nothing)
    _say_stopped(stopped)


def _emails_of(entry: Suppression) -> str:
    return "all emails" if entry.topic is None else f"emails with the topic {entry.topic}"


def _say_stopped(stopped: list[UUID]) -> None:
    if stopped:
        about = f"{counted(len(stopped), 'email')} failed because the recipients were suppressed. For example:"
        say(about + examples(stopped[:_EXAMPLES]))


command: Final = _commands()


@command.command("import", params=[_TENANT, _KIND, _TOPIC])
@click.argument("file", type=click.File("r", encoding="utf-8-sig", errors="replace"), metavar="FILE|-")
@audit_options()
@click.option("--dry-run", is_flag=True, help="Only check the file; change nothing.")
@json_option()
def import_(
    file: TextIO,
    tenant_id: str | None,
    kind: str | None,
    topic: str | None,
    act: Act,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Suppress the recipients in a file.

    \b
    Examples:
      dispatcher suppressions import bounces.csv --kind hard_bounce --reason "moved from another provider"
      cut -f1 list.tsv | dispatcher suppressions import - --reason "customers who left"

    The file has one address or domain per line, or it is CSV with a heading line. The CSV columns are recipient (which
    may also be named address, email or domain), kind, topic, note and expires_at. The output of `dispatcher
    suppressions export` can be imported, too. The command reports each invalid line by its number, and adds all valid
    lines.

    Exit codes: 0 done, 1 every line was refused, 3 some lines were refused.
    """
    asked = face.read_options(actions.ListSuppressions, {"tenant_id": tenant_id, "kind": kind, "topic": topic})
    from dispatcher.ops.suppressions import import_lines

    tenant_id, reason = asked.tenant_id or DEFAULT_TENANT, asked.kind or SuppressionReason.MANUAL
    done = run_with_session(
        "suppressions",
        lambda session: import_lines(
            session, tenant_id, file, None if dry_run else act, reason=reason, topic=asked.topic
        ),
    )
    if as_json:
        print_json(done)
    for refusal in done.refused[:_REFUSALS_SHOWN]:
        say(f"line {refusal.line}: {refusal.reason}")
    if len(done.refused) > _REFUSALS_SHOWN:
        say(f"{counted(len(done.refused) - _REFUSALS_SHOWN, 'more line')} refused.")
    if dry_run:
        say(f"{counted(done.valid, 'valid line')}. Nothing was changed.")
    else:
        say(AddedSuppressions(done.added, done.valid - done.added).describe())
    return (Exit.PARTLY if done.valid else Exit.FAILED) if done.refused else Exit.DONE


@command.command("export", params=[_TENANT])
def export(tenant_id: str | None) -> int:
    """Print all suppressed recipients as CSV.

    \b
    Example:
      dispatcher suppressions export > suppressed.csv

    The database does not store the addresses of suppressed recipients, so the file contains hashes and masked
    addresses. Import the file only into the same database, or into a copy of it: in any other database, the hashes
    match no address.
    """
    asked = face.read_options(actions.ListSuppressions, {"tenant_id": tenant_id})
    from dispatcher.ops import suppressions
    from dispatcher.store.suppressions import Exported

    async def write(session: AsyncSession) -> None:
        print_data(_csv(Exported._fields))
        async for entry in suppressions.export(session, asked.tenant_id or DEFAULT_TENANT):
            if not print_data(_csv(entry)):
                return

    run_with_session("suppressions", write)
    return Exit.DONE


def _csv(cells: Iterable[object]) -> str:
    line = io.StringIO()
    texts = [cell.isoformat() if isinstance(cell, datetime) else "" if cell is None else str(cell) for cell in cells]
    csv.writer(line, lineterminator="").writerow(texts)
    return line.getvalue()
