"""`dispatcher suppressions import` and `export`: files of recipients who get no email."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from typing import TYPE_CHECKING, Final, TextIO

import click

from dispatcher.cli.exits import Exit
from dispatcher.cli.options import audit_options, json_option
from dispatcher.cli.output import counted, print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.suppression_options import already, kind_option, tenant_option
from dispatcher.domain.suppression import SuppressionReason

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act
    from dispatcher.ops.suppressions import RefusedLine
    from dispatcher.store.connections import AsyncSession
    from dispatcher.store.suppressions import Entry


_REFUSALS_SHOWN: Final = 20


@click.command("import")
@click.argument("file", type=click.File("r", encoding="utf-8-sig", errors="replace"), metavar="FILE|-")
@tenant_option
@kind_option
@audit_options()
@click.option("--dry-run", is_flag=True, help="Only check the file; change nothing.")
@json_option()
def import_(file: TextIO, tenant_id: str, kind: str, act: Act, dry_run: bool, as_json: bool) -> int:
    """Suppress the recipients in a file.

    \b
    Examples:
      dispatcher suppressions import bounces.csv --kind hard_bounce --reason "moved from another provider"
      cut -f1 list.tsv | dispatcher suppressions import - --reason "customers who left"

    The file has one address or domain per line, or it is CSV with a heading line. The CSV columns are recipient (which
    may also be named address, email or domain), kind, note and expires_at. The output of `dispatcher suppressions
    export` can be imported, too. The command reports each invalid line by its number, and adds all valid lines.

    Exit codes: 0 done, 1 every line was refused, 3 some lines were refused.
    """
    from dispatcher.ops import suppressions
    from dispatcher.store.address_hashes import AddressHasher

    refusals: list[RefusedLine] = []

    async def read(session: AsyncSession) -> tuple[int, int]:
        """The number of valid lines, and the number of new or changed entries."""
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
        say(f"Suppressed {counted(added, 'recipient')}" + already(valid - added))
    return (Exit.PARTLY if valid else Exit.FAILED) if refusals else Exit.DONE


@click.command("export")
@tenant_option
def export(tenant_id: str) -> int:
    """Print all suppressed recipients as CSV.

    \b
    Example:
      dispatcher suppressions export > suppressed.csv

    The database does not store the addresses of suppressed recipients, so the file contains hashes and masked
    addresses. Import the file only into the same database, or into a copy of it: in any other database, the hashes
    match no address.
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
