"""Finds emails by recipient, domain, correlation id and other properties. See sql/queries/lookup.sql."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.listed_email import ListedEmail
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Source, fetch, from_rows, statement


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one page of a look-up reads. With the defaults, a page takes some tens of milliseconds.

    Attributes:
        rows: The most rows of `email_log` that a page reads in the order of an index.
        emails: The most emails that a page looks up by their ids.
        checked: The number of emails whose contents one statement reads.
        most_checked: The most emails whose contents a page reads.
    """

    rows: int = 20_000
    emails: int = 500
    checked: int = 500
    most_checked: int = 5_000

    def examined(self, start: Start) -> int:
        """The most emails that one statement reads, if it finds them by the filter `start`."""
        return self.emails if start in (Start.RECIPIENT, Start.DOMAIN) else self.rows


BUDGET: Final = Budget()
LOWEST: Final = UUID(int=0)
HIGHEST: Final = UUID(int=2**128 - 1)


COLUMNS: Final = ("correlation_id", "status", "provider", "error_type", "tenant_id", "lane", "channel")
"""The criteria that the statement compares with columns."""


class Start(StrEnum):
    """The filter by which a look-up reads emails. The other filters are applied to the emails that were read."""

    RECIPIENT = "recipient"
    DOMAIN = "domain"
    CORRELATION_ID = "correlation_id"
    STATUS = "status"
    """Every status except `sent`, which has no index."""
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """Which emails to find; a field that is None does not filter.

    Attributes:
        recipient: The hash of an address, and the address's domain.
    """

    recipient: tuple[bytes, str] | None = None
    domain: str | None = None
    correlation_id: str | None = None
    status: Status | None = None
    provider: str | None = None
    error_type: str | None = None
    tenant_id: str | None = None
    lane: str | None = None
    channel: str | None = None
    below_id: UUID = HIGHEST
    from_id: UUID = LOWEST


@statement
async def hash_address(source: Source, address: str) -> bytes: ...


async def find_recipients_since(source: Source) -> datetime | None:
    """Emails that were enqueued before this time cannot be found by recipient. None if all emails can be found."""
    ((since, has_older),) = await fetch(source, "find_recipients_since")
    return since if has_older else None


def find_start(wanted: Criteria) -> Start:
    """Chooses the filter that probably selects the fewest emails."""
    if wanted.recipient is not None:
        return Start.RECIPIENT
    if wanted.correlation_id is not None:
        return Start.CORRELATION_ID
    if wanted.domain is not None:
        return Start.DOMAIN
    return Start.ALL if wanted.status in (None, Status.SENT) else Start.STATUS


async def find_emails(
    source: Source, wanted: Criteria, *, limit: int, start: Start, budget: Budget = BUDGET
) -> tuple[list[ListedEmail], UUID | None]:
    """Up to `limit` emails, newest first, and the `below_id` of the next page, which is None after the last page.

    A page reads at most `Budget.examined` emails, so a page with few or no emails is not necessarily the last page.
    """
    address_hash, recipient_domain = wanted.recipient or (None, None)
    if start is Start.DOMAIN:
        recipient_domain = wanted.domain
    parameters: dict[str, Any] = {
        **{name: getattr(wanted, name) for name in (*COLUMNS, "below_id", "from_id")},
        "start": start.value,
        "address_hash": address_hash,
        "recipient_domain": recipient_domain,
        "limit": limit,
        "examined": min(limit, budget.examined(start)) if _is_decided(wanted, start) else budget.examined(start),
    }
    rows = await fetch(source, "find_emails", parameters)
    found = from_rows(ListedEmail, [row[:-1] for row in rows if row[0] is not None])
    return found, found[-1].id if len(found) == limit else rows[0][-1]


def _is_decided(wanted: Criteria, start: Start) -> bool:
    """Whether no filter except `start` is set.

    If so, every email that the statement reads matches, so a page reads only `limit` emails.
    """
    used = {
        Start.CORRELATION_ID: wanted.correlation_id,
        Start.STATUS: wanted.status,
        Start.ALL: None,
        Start.RECIPIENT: None,
        Start.DOMAIN: None,
    }
    if start not in used:
        return False
    return sum(getattr(wanted, each) is not None for each in COLUMNS) == (used[start] is not None)


async def find_with_domain(source: Source, email_ids: Sequence[UUID], domain: str) -> set[UUID]:
    """The ids of the given emails that have a recipient at the domain."""
    return await _matching(source, "find_with_domain", email_ids, {"domain": domain})


async def find_with_tag(source: Source, email_ids: Sequence[UUID], tag: str) -> set[UUID]:
    """The ids of the given emails that have the tag. Leaves out emails whose content was deleted."""
    return await _matching(source, "find_with_tag", email_ids, {"tag": tag})


async def find_from(source: Source, email_ids: Sequence[UUID], senders: Sequence[str]) -> set[UUID]:
    """The ids of the given emails whose sender is one of `senders`. Leaves out emails whose content was deleted.

    Args:
        senders: Addresses, or domains such as `@example.com`; in lower case.
    """
    return await _matching(source, "find_from", email_ids, {"senders": list(senders)})


async def _matching(source: Source, name: str, email_ids: Sequence[UUID], parameters: dict[str, Any]) -> set[UUID]:
    if not email_ids:
        return set()
    return {row[0] for row in await fetch(source, name, {**ids_within(set(email_ids)), **parameters})}
