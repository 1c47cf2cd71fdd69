"""For operators: adds, removes, imports and exports suppressions, and finds the emails that suppressions stopped."""

from __future__ import annotations

import csv
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.domain.instant import parse_instant
from dispatcher.domain.scrub import scrub
from dispatcher.domain.suppression import Recipient, SuppressionReason
from dispatcher.errors import InvalidEmail
from dispatcher.ops.acts import Act
from dispatcher.store import operators_lists, suppressions
from dispatcher.store.address_hashes import HASH_OCTETS, AddressHasher
from dispatcher.store.connections import AsyncSession
from dispatcher.store.operators_lists import Cursor, ListPage
from dispatcher.store.recipients import find_recipients
from dispatcher.store.statements import Source
from dispatcher.store.suppressions import Entry, Suppression, hash_of

BATCH: Final = 1000
COLUMNS: Final = ("recipient", "kind", "note", "expires_at", "created_at", "source_email_id", "is_domain", "hash")
"""The columns of an export. An import reads `recipient`, `kind`, `note`, `expires_at`, `is_domain` and `hash`."""
_MASKED: Final = re.compile(r"[^@]?•••(?:@[^@ ]{1,255})?")
"""The masked form of an address; see `Recipient.masked`."""
_NAMES: Final = ("recipient", "address", "email", "domain")
"""The names that an imported column of addresses and domains may have."""


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """Why a line of an import was refused, without the text of the line.

    Attributes:
        line: The line's number, from 1.
    """

    line: int
    reason: str


async def add(
    session: AsyncSession,
    tenant_id: str,
    recipients: Iterable[Recipient],
    act: Act,
    *,
    reason: SuppressionReason = SuppressionReason.MANUAL,
    note: str | None = None,
    expires_at: datetime | None = None,
) -> int:
    """Suppresses recipients. Returns how many entries are new or changed. Idempotent.

    Args:
        note: A note for operators, from which addresses are removed.
        expires_at: When the entries end; None for never.
    """
    hasher = await AddressHasher.open(session)
    kept = scrub(note) or None if note else None
    return await add_entries(
        session, tenant_id, [Entry.of(each, hasher, reason, kept, expires_at) for each in recipients], act
    )


async def add_entries(session: AsyncSession, tenant_id: str, entries: Iterable[Entry], act: Act) -> int:
    """Like `add`, for values of the type `Entry`, such as those that `read_entries` returns."""
    unique = list({entry.address_hash: entry for entry in entries}.values())
    added = 0
    for start in range(0, len(unique), BATCH):
        part = unique[start : start + BATCH]
        added += await suppressions.insert_suppressions(session, tenant_id, part, actor=act.actor, reason=act.reason)
    return added


async def remove(session: AsyncSession, tenant_id: str, recipients: Sequence[Recipient], act: Act) -> int:
    """Removes recipients' entries; returns how many it removed. The recipients get later emails again. Idempotent."""
    hasher = await AddressHasher.open(session)
    hashes = [hash_of(each, hasher) for each in recipients]
    return len(await suppressions.delete_suppressions(session, tenant_id, hashes, actor=act.actor, reason=act.reason))


async def unsubscribe(session: AsyncSession, token: str) -> bool:
    """Suppresses the recipient of a token from an email's List-Unsubscribe header. Idempotent.

    Returns:
        Whether the token is genuine and the email that it belongs to still exists.
    """
    hasher = await AddressHasher.open(session)
    if (found := hasher.read_unsubscribe_token(token)) is None:
        return False
    email_id, address_hash = found
    addresses = (await find_recipients(session, [email_id])).get(email_id, ())
    masked = next((Recipient.parse(each).masked for each in addresses if hasher.hash(each) == address_hash), "•••")
    return await suppressions.insert_unsubscribe(session, email_id, address_hash, masked)


async def opt_out(source: Source, number: str, message_id: str) -> None:
    """Suppresses a phone number that has answered STOP.

    Each tenant that sent one of the last 1,000 SMS to the number gets the entry. If there is no such tenant, the tenant
    `default` gets the entry. Idempotent: a second call with the same `message_id` changes nothing.

    Args:
        message_id: The id of the recipient's SMS.
    """
    address_hash = (await AddressHasher.open(source)).hash(number)
    await suppressions.opt_out(source, address_hash, Recipient(number, is_domain=False).masked, message_id)


async def opt_in(source: Source, number: str, message_id: str) -> None:
    """Ends the suppression of a phone number that has answered START, for all tenants.

    Removes only entries with the reason `unsubscribe`. Idempotent: a second call with the same `message_id` changes
    nothing.

    Args:
        message_id: The id of the recipient's SMS.
    """
    await suppressions.opt_in(source, (await AddressHasher.open(source)).hash(number), message_id)


async def find(session: AsyncSession, tenant_id: str, recipient: Recipient) -> list[Suppression]:
    """The entries that suppress a recipient: the recipient's own entry; for an address, also its domain's entry."""
    hasher = await AddressHasher.open(session)
    hashes = [hash_of(recipient, hasher), hasher.hash_domain(recipient.text)]
    return await suppressions.list_suppressions(session, tenant_id, address_hashes=hashes, limit=len(hashes))


async def list_entries(
    session: AsyncSession,
    tenant_id: str,
    *,
    reason: SuppressionReason | None = None,
    since: datetime | None = None,
    before: Cursor | None = None,
    limit: int,
) -> ListPage[Suppression]:
    """A page of a tenant's entries, newest first. A page may be empty although more entries follow (`next` is set).

    Raises:
        ValueError: `before` is the cursor of another list. The error's text is a predicate, such as `must be …`.
    """
    return await operators_lists.list_suppressions(
        session, tenant_id, reason=reason, since=since, before=before, limit=limit
    )


async def export(session: AsyncSession, tenant_id: str) -> AsyncIterator[Suppression]:
    """All entries of a tenant, newest first."""
    before: int | None = None
    while page := await suppressions.list_suppressions(session, tenant_id, before=before, limit=BATCH):
        for entry in page:
            yield entry
        before = page[-1].suppression_id


async def find_stopped(session: AsyncSession, tenant_id: str, recipients: Sequence[Recipient]) -> list[UUID]:
    """The emails that failed because all their recipients were suppressed, and that have one of these recipients.

    Oldest first. Each of these emails can be replayed. An email that was sent to some of its recipients is not
    included.
    """
    hasher = await AddressHasher.open(session)
    wanted = {hash_of(each, hasher) for each in recipients}
    found: list[UUID] = []
    after: UUID | None = None
    while page := await suppressions.list_stopped(session, tenant_id, after=after, limit=BATCH):
        for email_id, addresses in page:
            hashes = {each for text in addresses for each in (hasher.hash(text), hasher.hash_domain(text))}
            if not wanted.isdisjoint(hashes):
                found.append(email_id)
        after = page[-1][0]
    return found


def read_entries(
    lines: Iterable[str], hasher: AddressHasher, *, reason: SuppressionReason = SuppressionReason.MANUAL
) -> Iterator[Entry | RefusedLine]:
    """Reads a CSV file with a heading, or one address or domain per line. Ignores blank lines.

    Args:
        reason: The reason of entries without a value in the column `kind`.
    """
    reader = csv.reader(lines)
    names: list[str] | None = None
    for cells in _rows(reader):
        if cells is None:
            yield RefusedLine(reader.line_num, "the line is not CSV")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        lowered = [cell.strip().lower().lstrip("\ufeff") for cell in cells]
        if names is None:
            names = lowered if not {*_NAMES, "hash"}.isdisjoint(lowered) else ["recipient"]
            if names is lowered:
                continue
        try:
            yield _entry(dict(zip(names, cells, strict=False)), hasher, reason)
        except InvalidEmail as error:
            yield RefusedLine(reader.line_num, f"{error.field} {error.reason}")
        except ValueError as error:
            yield RefusedLine(reader.line_num, str(error))


def _rows(reader: Iterator[list[str]]) -> Iterator[list[str] | None]:
    """The rows of a CSV file; None for a row that cannot be read, for example because a cell is too long."""
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield None


def _entry(cells: dict[str, str], hasher: AddressHasher, reason: SuppressionReason) -> Entry:
    given = {name: cell.strip() for name, cell in cells.items() if cell.strip()}
    if "kind" in given:
        try:
            reason = SuppressionReason(given["kind"])
        except ValueError:
            raise ValueError(f"kind must be one of: {', '.join(SuppressionReason)}") from None
    note = scrub(given["note"]) or None if "note" in given else None
    try:
        expires_at = parse_instant(given["expires_at"]) if "expires_at" in given else None
    except ValueError as error:
        raise ValueError(f"expires_at {error}") from None
    text = next((given[name] for name in _NAMES if name in given), "")
    if "hash" in given:
        return Entry(
            _hash(given["hash"]), given.get("is_domain") == "true", scrub_masked(text), reason, note, expires_at
        )
    return Entry.of(Recipient.parse(text), hasher, reason, note, expires_at)


def _hash(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != HASH_OCTETS:
        raise ValueError(f"hash must be {2 * HASH_OCTETS} hexadecimal digits, as in an export of this database")
    return found


def scrub_masked(text: str) -> str:
    """The masked form of a text. Masks an address or a domain; keeps a text that is already masked, as in an export.

    Any other text becomes `•••`.
    """
    try:
        return text if _MASKED.fullmatch(text) and text.isprintable() else Recipient.parse(text).masked
    except InvalidEmail:
        return "•••"
