"""Reads the recipients of emails, and repairs the index of the recipients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.suppression import Recipient
from dispatcher.store.address_hashes import AddressHasher, normalised
from dispatcher.store.bisection import bisect_batch
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Row, Source, fetch, statement

RECIPIENT_OCTETS: Final = 6
"""How many bytes of a hash the table `email_recipient` has."""


@statement
async def may_read_recipients(source: Source) -> bool: ...


async def fetch_readable(source: Source, name: str, email_ids: Collection[UUID]) -> list[Row]:
    """The rows of a statement for these emails. Leaves out emails with a row that cannot be read."""
    if not email_ids:
        return []
    answers, _ = await bisect_batch([*set(email_ids)], lambda part: fetch(source, name, ids_within(part)))
    return [row for rows in answers for row in rows]


async def find_recipients(source: Source, email_ids: Collection[UUID]) -> dict[UUID, list[str]]:
    """The addresses to which each email is sent, as they were enqueued. Leaves out emails whose content was deleted or
    cannot be read."""
    rows = await fetch_readable(source, "find_recipients", email_ids)
    return {email_id: list(chain.from_iterable(addresses_by_field(found))) for email_id, found in rows}


def addresses_by_field(recipients: Any) -> list[list[str]]:
    """The addresses of To, Cc and Bcc in a value of `email_content.recipients`. Leaves out what is no text: the row may
    be damaged."""
    lists = [recipients.get(field) if isinstance(recipients, dict) else None for field in ("to", "cc", "bcc")]
    return [[each for each in listed if isinstance(each, str)] if isinstance(listed, list) else [] for listed in lists]


async def masked_recipients(source: Source, email_ids: Collection[UUID]) -> dict[UUID, list[str]]:
    """The masked recipients of each email, such as `a•••@example.org`, in the order To, Cc, Bcc. Leaves out emails
    whose content was deleted. Empty if the PostgreSQL role may not read addresses."""
    found = await find_recipients(source, email_ids) if await may_read_recipients(source) else {}
    return {
        email_id: [Recipient(normalised(address), is_domain=False).masked for address in addresses]
        for email_id, addresses in found.items()
    }


async def find_recipient_hashes(
    source: Source, email_ids: Collection[UUID], hasher: AddressHasher
) -> dict[UUID, set[bytes]]:
    """The first RECIPIENT_OCTETS bytes of the hash of each recipient, by email, even if the content was deleted."""
    found = await find_recipients(source, email_ids)
    hashes = {email: {hasher.hash(each)[:RECIPIENT_OCTETS] for each in found[email]} for email in found}
    if missing := set(email_ids) - found.keys():
        hashes |= {row[0]: set(row[1]) for row in await fetch(source, "find_recipient_hashes", ids_within(missing))}
    return hashes


async def summarize_recipients(source: Source) -> list[str]:
    """Creates missing summaries in the index of the recipients, and replaces unfinished ones, each partition in a
    transaction. Leaves out a partition that vacuum is working on. Returns the names of the changed partitions."""
    partitions = await list_recipient_partitions(source)
    return [each for each in partitions if await summarize_recipient_partition(source, each)]


@statement
async def list_recipient_partitions(source: Source) -> list[str]: ...
@statement
async def summarize_recipient_partition(source: Source, partition: str) -> bool: ...


async def find_held_recipients(source: Source, email_id: UUID, addresses: Sequence[str]) -> set[str]:
    """Which of these normalised addresses are recipients of an email; all of them if its recipients were deleted."""
    rows = await fetch(source, "find_held_recipients", {"email_id": email_id, "addresses": list(addresses)})
    return {row[0] for row in rows}
