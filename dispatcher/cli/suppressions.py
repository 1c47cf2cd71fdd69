"""`dispatcher suppressions`: lists, adds and removes recipients who get no email."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import UUID

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import Number, audit_options, confirm, json_option
from dispatcher.cli.output import counted, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.suppression_files import export, import_
from dispatcher.cli.suppression_options import RecipientText, already, kind_option, recipients_argument, tenant_option
from dispatcher.cli.table import Table
from dispatcher.domain.suppression import SuppressionReason

if TYPE_CHECKING:
    from dispatcher.domain.suppression import Recipient
    from dispatcher.ops.acts import Act
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.suppressions import Suppression

_EXAMPLES: Final = 5
_days_option: Final = click.option(
    "--days", type=click.IntRange(1, 36500), metavar="N", help="The entry ends after N days.  [default: never]"
)


@click.group("suppressions")
def command() -> None:
    """List, add, remove, import and export the recipients who get no email.

    \b
    Examples:
      dispatcher suppressions list
      dispatcher suppressions add ann@example.org --reason "closed account"
      dispatcher suppressions remove ann@example.org --reason "mailbox works again" --replay

    A hard bounce, a complaint or an unsubscribe suppresses the recipient automatically (see DISPATCHER_SUPPRESS_ON).
    The database does not store the addresses of suppressed recipients, only keyed hashes and masked forms such as
    `a•••@example.org`.
    """


command.add_command(import_)
command.add_command(export)


@command.command("list")
@click.argument("recipient", metavar="[ADDRESS|DOMAIN]", required=False, type=RecipientText())
@tenant_option
@click.option(
    "--kind", type=click.Choice([reason.value for reason in SuppressionReason]), help="Only entries of this kind."
)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), metavar="N", default=50, show_default=True, help="Entries per page."
)
@click.option("--before", type=click.IntRange(1), metavar="ID", help="Show the next page: entries older than ID.")
@json_option()
def list_(
    recipient: Recipient | None, tenant_id: str, kind: str | None, limit: int, before: int | None, as_json: bool
) -> int:
    """List suppressed recipients, newest first.

    \b
    Examples:
      dispatcher suppressions list --kind complaint
      dispatcher suppressions list ann@example.org

    \b
    JSON: {"suppressions": [{"suppression_id": …, "masked": …, "reason": …, …}], "next_before": null}

    In the JSON, `reason` is the kind of the entry, such as hard_bounce.
    """
    from dispatcher.ops.suppressions import find
    from dispatcher.store.suppressions import list_suppressions

    async def entries(session: AsyncSession) -> list[Suppression]:
        if recipient is not None:
            return await find(session, tenant_id, recipient)
        reason = SuppressionReason(kind) if kind else None
        return await list_suppressions(session, tenant_id, reason=reason, before=before, limit=limit)

    found = run_with_session("suppressions", entries)
    next_before = found[-1].suppression_id if recipient is None and len(found) == limit else None
    if as_json:
        documents = [{**asdict(entry), "address_hash": entry.address_hash.hex()} for entry in found]
        print_json({"suppressions": documents, "next_before": next_before})
    elif found:
        table = Table("id", "recipient", "kind", "since", "until", "email", "note", right=[0])
        for entry in found:
            until = entry.expires_at or "for ever"
            table.add(
                entry.suppression_id,
                entry.masked,
                entry.reason.value,
                entry.created_at,
                until,
                entry.source_email_id,
                entry.note,
                style="dim" if entry.expires_at and entry.expires_at < datetime.now(UTC) else "",
            )
        table.show()
        if next_before:
            say(f"Next page: --before {next_before}")
    else:
        say("No such recipient is suppressed." if recipient or kind else "No recipient is suppressed.")
    return Exit.DONE


@command.command("add")
@recipients_argument
@tenant_option
@kind_option
@_days_option
@click.option("--note", metavar="TEXT", help="A note for operators, without addresses.")
@audit_options()
@click.option("--dry-run", is_flag=True, help="Only check the recipients; change nothing.")
@json_option()
def add(
    recipients: tuple[Recipient, ...],
    tenant_id: str,
    kind: str,
    days: int | None,
    note: str | None,
    act: Act,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Suppress addresses and domains. A domain does not include its subdomains.

    \b
    Examples:
      dispatcher suppressions add ann@example.org --reason "closed account"
      dispatcher suppressions add example.net --days 30 --reason "their server is broken"

    A new entry replaces an existing entry that ends earlier. An existing entry that lasts at least as long as the new
    entry is not changed. Workers apply a new entry within two seconds.
    """
    from dispatcher.ops import suppressions

    if dry_run:
        say(f"{counted(len(recipients), 'recipient')}. Nothing was changed.")
        return Exit.DONE
    added = run_with_session(
        "suppressions",
        lambda session: suppressions.add(
            session,
            tenant_id,
            recipients,
            act,
            reason=SuppressionReason(kind),
            note=note,
            expires_at=_ends_after(days),
        ),
    )
    if as_json:
        print_json({"added": added})
    say(f"Suppressed {counted(added, 'recipient')}" + already(len(recipients) - added))
    return Exit.DONE


def _ends_after(days: int | None) -> datetime | None:
    return datetime.now(UTC) + timedelta(days=days) if days else None


@command.command("remove")
@recipients_argument
@tenant_option
@audit_options()
@click.option("--replay", is_flag=True, help="Also send the emails that failed because of the suppression, each once.")
@click.option("--rate", type=Number(min=0.01), metavar="N", help="With --replay: emails per second.  [default: 50]")
@click.option(
    "--dry-run", is_flag=True, help="Only show the entries, and the emails that failed because of them; change nothing."
)
@click.option("--yes", is_flag=True, help="With --replay: do not ask for confirmation; required without a terminal.")
@json_option()
def remove(
    recipients: tuple[Recipient, ...],
    tenant_id: str,
    act: Act,
    replay: bool,
    rate: float | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Let recipients get emails again.

    \b
    Examples:
      dispatcher suppressions remove ann@example.org --dry-run --reason "mailbox works again"
      dispatcher suppressions remove ann@example.org --reason "mailbox works again" --replay --yes

    Emails that failed because all their recipients were suppressed stay failed. With --replay, the command sends these
    emails like `dispatcher dlq replay`: each once, at a limited rate. The command is safe to repeat.

    Exit codes: 0 done; 1 there was no entry and no email to send; 2 confirmation needs a terminal or --yes; 3 only some
    emails were replayed.
    """
    from dispatcher.ops import suppressions

    settings = load_settings("database_url", "amqp_url") if replay else load_settings("database_url")

    async def look(session: AsyncSession) -> tuple[list[Suppression], list[UUID]]:
        entries = {
            entry.suppression_id: entry
            for recipient in recipients
            for entry in await suppressions.find(session, tenant_id, recipient)
        }
        return list(entries.values()), await suppressions.find_stopped(session, tenant_id, recipients)

    entries, stopped = run_with_session("suppressions", look, settings)
    if dry_run:
        _show_removal(entries, stopped, as_json=as_json)
        return Exit.DONE
    if replay and stopped:
        _say_stopped(stopped)
        confirm(f"Remove the entries, and replay {counted(len(stopped), 'email')}?", yes=yes)
    removed = run_with_session(
        "suppressions", lambda session: suppressions.remove(session, tenant_id, recipients, act), settings
    )
    say(f"Removed {counted(removed, 'suppressed recipient')}.")
    _warn_of_others(entries, recipients)
    if replay and stopped:
        return _replay(stopped, act, rate, as_json=as_json)
    if as_json:
        print_json({"removed": removed, "stopped_email_ids": stopped})
    if stopped:
        _say_stopped(stopped)
        say("To send each of them once, repeat this command with --replay.")
    return Exit.DONE if removed or stopped else Exit.FAILED


def _show_removal(entries: list[Suppression], stopped: list[UUID], *, as_json: bool) -> None:
    if as_json:
        print_json({"suppressions": [entry.suppression_id for entry in entries], "stopped_email_ids": stopped})
        return
    for entry in entries:
        say(f"{entry.masked}: {entry.reason}, since {entry.created_at:%Y-%m-%d %H:%M %Z}.")
    if not entries:
        say("No such recipient is suppressed.")
    _say_stopped(stopped)


def _say_stopped(stopped: list[UUID]) -> None:
    if stopped:
        examples = ", ".join(map(str, stopped[:_EXAMPLES]))
        say(f"{counted(len(stopped), 'email')} failed because the recipients were suppressed, such as {examples}.")


def _warn_of_others(entries: list[Suppression], recipients: tuple[Recipient, ...]) -> None:
    """Warns of each suppressed domain that contains one of the recipients, but is not to be removed."""
    named = {recipient.masked for recipient in recipients if recipient.is_domain}
    for entry in entries:
        if entry.is_domain and entry.masked not in named:
            say(f"The domain {entry.masked} is still suppressed, with all its addresses.")


def _replay(stopped: list[UUID], act: Act, rate: float | None, *, as_json: bool) -> int:
    from dispatcher.cli.dlq_replay import replay_ids

    return replay_ids(load_settings("database_url"), tuple(stopped), act, rate, as_json=as_json)
