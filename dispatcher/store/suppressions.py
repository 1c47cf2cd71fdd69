"""Reads suppressed recipients for workers, and adds, lists and removes them for operators and applications."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from sys import byteorder
from typing import Any, Final, NamedTuple
from uuid import UUID

from dispatcher.domain.suppression import AddedSuppressions, Recipient, Suppression, SuppressionReason
from dispatcher.domain.values import dataclass
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import Pool
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Row, Source, fetch, statement

MOST_NAMED: Final = 20
"""The most tenants with entries that are named."""


@dataclass(frozen=True, slots=True)
class SuppressedHashes:
    """The hashes of a tenant's suppressed addresses and domains: of all entries, or only of changed entries."""

    numbers: array[int]  # the first eight bytes of each hash (see `number_of`), in ascending order
    has_domains: bool


@dataclass(frozen=True, slots=True)
class SuppressionsRead:
    """The suppressed recipients that a worker has read, by tenant."""

    by_tenant: Mapping[str, SuppressedHashes]
    until: str  # where this read ended, for the next call of `read_changed`


def number_of(address_hash: bytes) -> int:
    """The first eight bytes of a hash, as a number."""
    return int.from_bytes(address_hash[:8], "big")


class SuppressionReader:
    """Reads suppressed recipients, and suppresses recipients who unsubscribe, for one process. Each method raises
    StoreUnavailable if the same call might succeed later."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def open_hasher(self) -> AddressHasher:
        return await AddressHasher.open(self._pool)

    async def read_all(self) -> SuppressionsRead:
        """All entries that have not expired, of all tenants."""
        return _read(await fetch(self._pool, "read_suppressions"))

    async def read_changed(self, since: str) -> SuppressionsRead:
        """The entries that were added or changed after an earlier read. Can contain entries that were read before."""
        return _read(await fetch(self._pool, "read_changed_suppressions", {"since": since}))

    async def find(
        self, questions: Mapping[UUID, Iterable[tuple[int, bytes]]]
    ) -> dict[UUID, dict[int, SuppressionReason]]:
        """Which recipients are suppressed for their email's tenant, and why: by email id, then by the recipient's
        position. A question is a recipient's position, and the hash of its address or domain."""
        asked = [(email_id, *each) for email_id, listed in questions.items() for each in listed]
        parameters = {
            **ids_within(questions),
            "emails": [email_id for email_id, _, _ in asked],
            "positions": [position for _, position, _ in asked],
            "address_hashes": [address_hash for _, _, address_hash in asked],
        }
        found: dict[UUID, dict[int, SuppressionReason]] = {}
        for email_id, position, reason in await fetch(self._pool, "find_suppressed", parameters):
            found.setdefault(email_id, {})[position] = SuppressionReason(reason)
        return found

    async def opt_out(self, email_id: UUID, masked: Mapping[bytes, str]) -> None:
        """Suppresses recipients of an email for the email's tenant, with the reason `unsubscribe`. Idempotent.
        `masked`: the masked address of each recipient (see `Recipient.masked`), by the hash of the address."""
        for address_hash, text in masked.items():
            await insert_unsubscribe(self._pool, email_id, address_hash, text, is_whole=True)


def _read(rows: Sequence[Row]) -> SuppressionsRead:
    by_tenant: dict[str, SuppressedHashes] = {}
    for tenant_id, joined, has_domains, _ in rows:
        numbers = array("Q", bytes(joined))
        if byteorder == "little":
            numbers.byteswap()
        if tenant_id is not None:
            by_tenant[tenant_id] = SuppressedHashes(numbers, has_domains)
    return SuppressionsRead(by_tenant, until=rows[0][3])


@dataclass(frozen=True, slots=True)
class Entry:
    """A recipient to suppress."""

    address_hash: bytes
    is_domain: bool
    masked: str
    reason: SuppressionReason
    note: str | None = None
    expires_at: datetime | None = None
    topic: str | None = None

    @classmethod
    def of(
        cls,
        recipient: Recipient,
        hasher: AddressHasher,
        reason: SuppressionReason,
        note: str | None = None,
        expires_at: datetime | None = None,
        topic: str | None = None,
    ) -> Entry:
        hashed = hash_of(recipient, hasher)
        return cls(hashed, recipient.is_domain, recipient.masked, reason, note, expires_at, topic)


def hash_of(recipient: Recipient, hasher: AddressHasher) -> bytes:
    return hasher.hash_domain(recipient.text) if recipient.is_domain else hasher.hash(recipient.text)


class Exported(NamedTuple):
    """A line of an export. The names of its fields are the heading."""

    recipient: str
    kind: SuppressionReason
    note: str | None
    expires_at: datetime | None
    created_at: datetime
    source_email_id: UUID | None
    is_domain: str
    hash: str
    topic: str | None


def parameters_of(entries: Sequence[Entry]) -> dict[str, Any]:
    """The parameters of `insert_suppressions` for entries; of several entries for a recipient and topic, only the
    last one."""
    unique = {(entry.address_hash, entry.topic): entry for entry in entries}.values()
    return {
        "address_hashes": [entry.address_hash for entry in unique],
        "are_domains": [entry.is_domain for entry in unique],
        "masked": [entry.masked for entry in unique],
        "reasons": [entry.reason.value for entry in unique],
        "notes": [entry.note for entry in unique],
        "expire_ats": [entry.expires_at for entry in unique],
        "topics": [entry.topic for entry in unique],
    }


async def insert_suppressions(
    source: Source, tenant_id: str, entries: Sequence[Entry], *, actor: str, reason: str
) -> AddedSuppressions:
    """Adds entries, and an audit record. A new entry replaces an old entry only if the new entry lasts longer."""
    who = {"tenant_id": tenant_id, "actor": actor, "reason": reason}
    (added,) = await fetch(source, "insert_suppressions", {**parameters_of(entries), **who}, into=AddedSuppressions)
    return added


@statement
async def insert_unsubscribe(
    source: Source, email_id: UUID, address_hash: bytes, masked: str, *, is_whole: bool
) -> list[str | None]: ...
@statement
async def opt_out(source: Source, address_hash: bytes, masked: str, message_id: str) -> None: ...
@statement
async def opt_in(source: Source, address_hash: bytes, message_id: str) -> None: ...
@statement
async def delete_suppressions(
    source: Source, tenant_id: str, address_hashes: Sequence[bytes], ids: Sequence[int], *, actor: str, reason: str
) -> list[bytes]: ...
@statement
async def find_suppressions_of_email(source: Source, tenant_id: str, email_id: UUID) -> list[Suppression]: ...
@statement
async def list_suppressing_tenants(source: Source, *, tenant_id: None = None, most: int = MOST_NAMED) -> list[str]: ...
@statement
async def export_suppressions(
    source: Source, tenant_id: str, *, before: int | None, limit: int
) -> dict[int, Exported]: ...
@statement
async def list_stopped(
    source: Source, tenant_id: str, *, after: UUID | None, limit: int
) -> list[tuple[UUID, dict[str, list[str]], str | None]]: ...
