"""`dispatcher suppressions`: lists, adds, removes, imports and exports recipients who get no email."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TextIO
from uuid import UUID

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import DEFAULT_TENANT
from dispatcher.cli.options import audit_options, confirm, json_option
from dispatcher.cli.output import counted, print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.email_rules import tenant
from dispatcher.domain.suppression import Recipient, SuppressionReason
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.ops.suppressions import RefusedLine
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.suppressions import Entry, Suppression

_EXAMPLES: Final = 5
_REFUSALS_SHOWN: Final = 20


class RecipientText(click.ParamType[Recipient]):
    """An address or a domain."""

    name = "recipient"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Recipient:
        """The recipient."""
        try:
            return value if isinstance(value, Recipient) else Recipient.parse(str(value))
        except InvalidEmail as error:
            self.fail(f"{value!r} {error.reason}.", param, ctx)


class TenantText(click.ParamType[str]):
    """A tenant's id."""

    name = "tenant"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The id, unchanged."""
        try:
            return tenant(value)
        except InvalidEmail as error:
            self.fail(f"{error.reason}.", param, ctx)


_tenant_option: Final = click.option(
    "--tenant",
    "tenant_id",
    type=TenantText(),
    default=DEFAULT_TENANT,
    show_default=True,
    metavar="ID",
    help="The tenant. Each tenant has its own suppressed recipients.",
)
_kind_option: Final = click.option(
    "--kind",
    type=click.Choice([reason.value for reason in SuppressionReason]),
    default=SuppressionReason.MANUAL.value,
    show_default=True,
    help="Why the recipient gets no email.",
)
_recipients_argument: Final = click.argument(
    "recipients", metavar="ADDRESS|DOMAIN...", nargs=-1, required=True, type=RecipientText()
)
_days_option: Final = click.option(
    "--days", type=click.IntRange(1, 36500), metavar="N", help="End after N days.  [default: never]"
)


@click.group("suppressions")
def command() -> None:
    """Recipients who get no email: list, add, remove, import, export.

    \b
    Examples:
      dispatcher suppressions list
      dispatcher suppressions add ann@example.org --reason "closed account"
      dispatcher suppressions remove ann@example.org --reason "mailbox works again" --replay

    Hard bounces, complaints and unsubscribes add entries by themselves (DISPATCHER_SUPPRESS_ON). The database contains
    no addresses, only keyed hashes and a masked form such as `a•••@example.org`.
    """


@command.command("list")
@click.argument("recipient", metavar="[ADDRESS|DOMAIN]", required=False, type=RecipientText())
@_tenant_option
@click.option(
    "--kind", type=click.Choice([reason.value for reason in SuppressionReason]), help="Only entries of this kind."
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Entries per page.")
@click.option("--before", type=click.IntRange(1), metavar="ID", help="Show the next page: entries older than this one.")
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
@_recipients_argument
@_tenant_option
@_kind_option
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

    An entry that already lasts as long stays as it is. Workers apply a new entry within two seconds.
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
    say(f"Suppressed {counted(added, 'recipient')}" + _already(len(recipients) - added))
    return Exit.DONE


def _ends_after(days: int | None) -> datetime | None:
    return datetime.now(UTC) + timedelta(days=days) if days else None


def _already(count: int) -> str:
    return f"; {counted(count, 'recipient')} already suppressed for as long." if count else "."


@command.command("remove")
@_recipients_argument
@_tenant_option
@audit_options()
@click.option("--replay", is_flag=True, help="Then send the emails that were stopped, each once.")
@click.option(
    "--rate", type=click.FloatRange(min=0.01), metavar="N", help="With --replay: emails per second.  [default: 50]"
)
@click.option("--dry-run", is_flag=True, help="Only show the entries and the stopped emails; change nothing.")
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

    Emails that failed because all their recipients were suppressed stay failed. With --replay, this command sends them
    like `dispatcher dlq replay`: each once, at a limited rate. The command is safe to repeat.

    Exit codes: 0 done, 1 there was no entry and no email to send, 2 confirmation needs a terminal or --yes, 3 only some
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
    """Says which addresses are still suppressed, because their domain is."""
    named = {recipient.masked for recipient in recipients if recipient.is_domain}
    for entry in entries:
        if entry.is_domain and entry.masked not in named:
            say(f"The domain {entry.masked} is still suppressed, with all its addresses.")


def _replay(stopped: list[UUID], act: Act, rate: float | None, *, as_json: bool) -> int:
    from dispatcher.cli.dlq_replay import run_replay
    from dispatcher.ops.replaying import DEFAULT_PER_SECOND, create
    from dispatcher.store.failures import Selection

    settings = load_settings("database_url", "amqp_url")
    made = run_with_session(
        "suppressions",
        lambda session: create(
            session, Selection(email_ids=tuple(stopped)), act, per_second=rate or DEFAULT_PER_SECOND, source="ids"
        ),
        settings,
    )
    return run_replay(settings, made.replay_id, as_json=as_json)


@command.command("import")
@click.argument("file", type=click.File("r", encoding="utf-8-sig", errors="replace"), metavar="FILE|-")
@_tenant_option
@_kind_option
@audit_options()
@click.option("--dry-run", is_flag=True, help="Only check the file; change nothing.")
@json_option()
def import_(file: TextIO, tenant_id: str, kind: str, act: Act, dry_run: bool, as_json: bool) -> int:
    """Suppress the recipients of a file.

    \b
    Examples:
      dispatcher suppressions import bounces.csv --kind hard_bounce --reason "moved from another provider"
      cut -f1 list.tsv | dispatcher suppressions import - --reason "customers who left"

    The file has one address or domain per line, or CSV with a heading. The CSV columns are recipient (or address,
    email, domain), kind, note, expires_at; or the columns of `dispatcher suppressions export`. The command reports each
    invalid line by its number, and adds all valid lines.

    Exit codes: 0 done, 1 every line was refused, 3 some lines were refused.
    """
    from dispatcher.ops import suppressions
    from dispatcher.store.address_hashes import AddressHasher

    refusals: list[RefusedLine] = []

    async def read(session: AsyncSession) -> tuple[int, int]:
        """The number of valid lines, and of new or changed entries."""
        valid = added = 0
        batch: list[Entry] = []
        hasher = await AddressHasher.open(session)
        for found in suppressions.read_entries(file, hasher, reason=SuppressionReason(kind)):
            if isinstance(found, suppressions.RefusedLine):
                refusals.append(found)
                continue
            valid += 1
            batch.append(found)
            if len(batch) == suppressions.BATCH and not dry_run:
                added += await suppressions.add_entries(session, tenant_id, batch, act)
                batch.clear()
        if not dry_run:
            added += await suppressions.add_entries(session, tenant_id, batch, act)
        return valid, added

    valid, added = run_with_session("suppressions", read)
    if as_json:
        lines = [{"line": refusal.line, "reason": refusal.reason} for refusal in refusals]
        print_json({"valid": valid, "added": added, "refused": lines})
    for refusal in refusals[:_REFUSALS_SHOWN]:
        say(f"line {refusal.line}: {refusal.reason}")
    if len(refusals) > _REFUSALS_SHOWN:
        say(f"{counted(len(refusals) - _REFUSALS_SHOWN, 'more line')} refused.")
    if dry_run:
        say(f"{counted(valid, 'valid line')}. Nothing was changed.")
    else:
        say(f"Suppressed {counted(added, 'recipient')}" + _already(valid - added))
    return (Exit.PARTLY if valid else Exit.FAILED) if refusals else Exit.DONE


@command.command("export")
@_tenant_option
def export(tenant_id: str) -> int:
    """Print all suppressed recipients as CSV.

    \b
    Example:
      dispatcher suppressions export > suppressed.csv

    The addresses are not stored, so no export contains them. `dispatcher suppressions import` reads the file again, on
    the same database or on a copy of it: only there do the hashes match.
    """
    from dispatcher.ops import suppressions

    async def write(session: AsyncSession) -> None:
        print_data(_csv(suppressions.COLUMNS))
        async for entry in suppressions.export(session, tenant_id):
            is_domain = "true" if entry.is_domain else "false"
            cells = (
                *(entry.masked, entry.reason.value, entry.note, entry.expires_at, entry.created_at),
                *(entry.source_email_id, is_domain, entry.address_hash.hex()),
            )
            if not print_data(_csv(cells)):
                return

    run_with_session("suppressions", write)
    return Exit.DONE


def _csv(cells: tuple[object, ...]) -> str:
    line = io.StringIO()
    texts = [cell.isoformat() if isinstance(cell, datetime) else "" if cell is None else str(cell) for cell in cells]
    csv.writer(line, lineterminator="").writerow(texts)
    return line.getvalue()
