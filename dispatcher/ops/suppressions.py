"""Imports and exports suppressions, finds the emails that they stopped, and suppresses who unsubscribes."""

from __future__ import annotations

import csv
import re
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final
from uuid import UUID

from dispatcher.domain import email_rules as rules
from dispatcher.domain.instant import parse_instant
from dispatcher.domain.scrub import scrub
from dispatcher.domain.suppression import Recipient, SuppressionReason
from dispatcher.errors import InvalidEmail
from dispatcher.ops.acts import Act
from dispatcher.store import suppressions
from dispatcher.store.address_hashes import HASH_OCTETS, AddressHasher, hash_with_topic
from dispatcher.store.connections import AsyncSession
from dispatcher.store.recipients import find_recipients
from dispatcher.store.statements import Source
from dispatcher.store.suppressions import Entry, Exported, hash_of

BATCH: Final = 1000
_MASKED: Final = re.compile(r"[^@]?•••(?:@[^@ ]{1,255})?")
"""The masked form of an address; see `Recipient.masked`."""
_NAMES: Final = ("recipient", "address", "email", "domain")
"""The names that an imported column of addresses and domains may have."""


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """Why a line of an import was refused, without its text. Numbers begin with 1."""

    line: int
    reason: str


@dataclass(slots=True)
class Imported:
    """What an import has done: the numbers of valid lines and of new or changed entries, and the refused lines."""

    valid: int = 0
    added: int = 0
    refused: list[RefusedLine] = field(default_factory=list)


async def hashes_of(
    source: Source, recipients: Iterable[str], *, topic: str | None = None, with_domains: bool = False
) -> list[bytes]:
    """The hashes under which recipients are stored; `with_domains` also those of the domains of addresses."""
    hasher = await AddressHasher.open(source)
    hashes = [hash_of(Recipient.parse(each), hasher) for each in recipients]
    if topic is not None:
        hashes = [hash_with_topic(each, topic) for each in hashes]
    return [*hashes, *map(hasher.hash_domain, recipients)] if with_domains else hashes


async def unsubscribe(session: AsyncSession, token: str, *, is_whole: bool) -> list[str | None]:
    """Suppresses the recipient of a token from an email's List-Unsubscribe header: for the topic of the email; for all
    emails of its tenant if it has none, or if `is_whole`. Idempotent.

    Returns this topic; empty if the token is not genuine, or its email no longer exists.
    """
    hasher = await AddressHasher.open(session)
    if (found := hasher.read_unsubscribe_token(token)) is None:
        return []
    email_id, address_hash = found
    addresses = (await find_recipients(session, [email_id])).get(email_id, ())
    masked = next((Recipient.parse(each).masked for each in addresses if hasher.hash(each) == address_hash), "•••")
    return await suppressions.insert_unsubscribe(session, email_id, address_hash, masked, is_whole=is_whole)


async def opt_out(source: Source, number: str, message_id: str) -> None:
    """Suppresses a phone number that has answered STOP.

    Each tenant that sent one of the last 1,000 SMS to the number gets the entry. If there is no such tenant, the tenant
    `default` gets the entry. Idempotent by the id of the recipient's SMS.
    """
    address_hash = (await AddressHasher.open(source)).hash(number)
    await suppressions.opt_out(source, address_hash, Recipient(number, is_domain=False).masked, message_id)


async def opt_in(source: Source, number: str, message_id: str) -> None:
    """Ends the suppression of a phone number that has answered START, for all tenants.

    Removes only entries with the reason `unsubscribe`. Idempotent by the id of the recipient's SMS.
    """
    await suppressions.opt_in(source, (await AddressHasher.open(source)).hash(number), message_id)


async def export(session: AsyncSession, tenant_id: str) -> AsyncIterator[Exported]:
    """All entries of a tenant, newest first."""
    before: int | None = None
    while page := await suppressions.export_suppressions(session, tenant_id, before=before, limit=BATCH):
        for entry in page.values():
            yield entry
        before = min(page)


async def find_stopped(source: Source, tenant_id: str, hashes: Collection[bytes]) -> list[UUID]:
    """The emails that failed because all their recipients were suppressed, and that have a recipient with one of the
    hashes (see `hashes_of`).

    Oldest first. Each of these emails can be replayed. An email that was sent to some of its recipients is not
    included.
    """
    hasher, wanted = await AddressHasher.open(source), set(hashes)
    found: list[UUID] = []
    after: UUID | None = None
    while page := await suppressions.list_stopped(source, tenant_id, after=after, limit=BATCH):
        for email_id, lists, topic in page:
            addresses = chain.from_iterable(lists.get(name, ()) for name in ("to", "cc", "bcc"))
            if not wanted.isdisjoint(each for text in addresses for each in hasher.suppressing_hashes(text, topic)):
                found.append(email_id)
        after = page[-1][0]
    return found


async def import_lines(
    source: Source,
    tenant_id: str,
    lines: Iterable[str],
    act: Act | None,
    *,
    reason: SuppressionReason = SuppressionReason.MANUAL,
    topic: str | None = None,
) -> Imported:
    """Suppresses the recipients in a CSV file with a heading, or in a file with one address or domain per line.

    Without an act, only checks the lines. `reason` and `topic` are for entries without a value in the column
    `kind` or `topic`.
    """
    done = Imported()
    read = read_entries(lines, await AddressHasher.open(source), reason, topic)
    while part := list(islice(read, BATCH)):
        entries = [each for each in part if isinstance(each, Entry)]
        done.valid += len(entries)
        done.refused += [each for each in part if isinstance(each, RefusedLine)]
        if act is not None and entries:
            added = await suppressions.insert_suppressions(
                source, tenant_id, entries, actor=act.actor, reason=act.reason
            )
            done.added += added.added
    return done


def read_entries(
    lines: Iterable[str], hasher: AddressHasher, reason: SuppressionReason, topic: str | None = None
) -> Iterator[Entry | RefusedLine]:
    """The entry of each line, or why the line is refused. Ignores blank lines."""
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
            yield _entry(dict(zip(names, cells, strict=False)), hasher, reason, topic)
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


def _entry(cells: dict[str, str], hasher: AddressHasher, reason: SuppressionReason, topic: str | None) -> Entry:
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
    topic = rules.topic("topic", given["topic"]) if "topic" in given else topic
    text = next((given[name] for name in _NAMES if name in given), "")
    if "hash" in given:
        is_domain, masked = given.get("is_domain") == "true", scrub_masked(text)
        return Entry(_hash(given["hash"]), is_domain, masked, reason, note, expires_at, topic)
    return Entry.of(Recipient.parse(text), hasher, reason, note, expires_at, topic)


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
