"""Finds emails by what an operator or an application knows: a recipient, a domain, a tag, a time.

    query = EmailQuery(recipient="ann@example.org", since=yesterday)
    page = await find(session, query, limit=50)
    while page.cursor is not None:
        page = await find(session, query, limit=50, cursor=page.cursor)

Recipients are found by their keyed hash (`store/address_hashes.py`). No result of `find` contains an address. To show
the recipients of the found emails, call `masked_recipients`, which reads and masks their addresses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import Recipient
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import InvalidEmail
from dispatcher.store.address_hashes import AddressHasher, normalised
from dispatcher.store.lookup import (
    BUDGET,
    HIGHEST,
    LOWEST,
    Budget,
    Criteria,
    FoundEmail,
    Start,
    find_emails,
    find_from,
    find_recipients_since,
    find_start,
    find_with_domain,
    find_with_tag,
    hash_address,
)
from dispatcher.store.recipients import find_recipients, may_read_recipients
from dispatcher.store.statements import Source

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 1_000
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""The earliest instant of a search, because email ids contain no earlier time."""

Check = Callable[[Sequence[UUID]], Awaitable[set[UUID]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmailQuery:
    """The filters of a search. An email must match each field that is not None. Must not be logged, because some
    filters are addresses.

    Attributes:
        recipient: An address in To, Cc or Bcc, with or without a display name; case does not matter.
        domain: The domain of a recipient.
        sender: An address, or a domain as `@example.com`. Does not match emails whose content was deleted.
        tag: One of the email's tags. Does not match emails whose content was deleted.
        since: The email was enqueued at this time or later.
        until: The email was enqueued before this time.
        provider: The provider of the last attempt.
        tenant_id: None for all tenants.
        channel: `email`, `sms`, or a channel that a package adds.
    """

    recipient: str | None = field(default=None, repr=False)
    domain: str | None = None
    correlation_id: str | None = None
    sender: str | None = field(default=None, repr=False)
    tag: str | None = None
    status: Status | None = None
    since: datetime | None = None
    until: datetime | None = None
    provider: str | None = None
    error_type: str | None = None
    tenant_id: str | None = None
    lane: str | None = None
    channel: str | None = None


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page of emails, newest first.

    Attributes:
        cursor: The value to pass to `find` for the next page; None if this is the last page.
        was_cut: Whether the search stopped at its limit of rows for one page, so that the page has fewer emails than
            requested. The next page may contain more emails.
        recipients_since: A search by recipient or domain finds only emails enqueued at this instant or later. None if
            it finds all emails, and for other searches.
    """

    rows: Sequence[FoundEmail]
    cursor: UUID | None
    was_cut: bool
    recipients_since: datetime | None = None


async def find(
    source: Source,
    query: EmailQuery,
    *,
    limit: int = DEFAULT_LIMIT,
    cursor: UUID | None = None,
    budget: Budget = BUDGET,
    is_sealed: bool = False,
) -> FoundPage:
    """A page of the emails that match. The cost is about the same for every filter, however many emails there are.

    Args:
        source: A session or a pool.
        cursor: The `cursor` of the previous page; None for the first page.
        budget: How much the search reads for one page.
        is_sealed: Whether the cursor may be shown to the query's tenant. Otherwise, it can be the id of another
            tenant's email, which also shows when that email was enqueued.

    Raises:
        InvalidEmail: The recipient, domain or sender is not valid. The error does not repeat the value.
    """
    hasher, tenant_id = await AddressHasher.open(source) if is_sealed else None, query.tenant_id or ""
    if hasher is not None and cursor is not None:
        cursor = hasher.unsealed(cursor, tenant_id)
    wanted = await _criteria(source, query, cursor)
    start = find_start(wanted)
    checks = _checks(source, query, wanted, start)
    if checks:
        rows, below = await _find_checked(source, wanted, start, checks, limit, budget)
    else:
        rows, below = await find_emails(source, wanted, limit=limit, start=start, budget=budget)
    since = None
    if query.recipient is not None or query.domain is not None:
        since = await find_recipients_since(source)
    was_cut = below is not None and len(rows) < limit
    if hasher is not None and below is not None:
        below = hasher.sealed(below, tenant_id)
    return FoundPage(rows, below, was_cut=was_cut, recipients_since=since)


async def masked_recipients(source: Source, email_ids: Sequence[UUID]) -> dict[UUID, list[str]]:
    """The masked recipients of each email, such as `a•••@example.org`, in the order To, Cc, Bcc.

    Leaves out emails whose content was deleted. Empty if the PostgreSQL role may not read addresses.
    """
    if not await may_read_recipients(source):
        return {}
    found = await find_recipients(source, email_ids)
    return {
        email_id: [Recipient(normalised(address), is_domain=False).masked for address in addresses]
        for email_id, addresses in found.items()
    }


async def _criteria(source: Source, query: EmailQuery, cursor: UUID | None) -> Criteria:
    recipient = None
    if query.recipient is not None:
        address = _recipient(query.recipient)
        recipient = (await hash_address(source, address), address.rpartition("@")[2] if "@" in address else "")
    until_id = HIGHEST if query.until is None else _id_at(query.until)
    return Criteria(
        recipient=recipient,
        domain=None if query.domain is None else _domain(query.domain),
        correlation_id=query.correlation_id,
        status=query.status,
        provider=query.provider,
        error_type=query.error_type,
        tenant_id=query.tenant_id,
        lane=query.lane,
        channel=query.channel,
        below_id=min(until_id, cursor or HIGHEST),
        from_id=LOWEST if query.since is None else _id_at(query.since),
    )


def _checks(source: Source, query: EmailQuery, wanted: Criteria, start: Start) -> list[Check]:
    """Functions for the filters of the query that `find_emails` does not apply.

    Each function takes the ids of emails, and returns the ids of the emails that match its filter.
    """
    checks: list[Check] = []
    if (domain := wanted.domain) is not None and start is not Start.DOMAIN:
        checks.append(lambda ids: find_with_domain(source, ids, domain))
    if (tag := query.tag) is not None:
        checks.append(lambda ids: find_with_tag(source, ids, tag))
    if query.sender is not None:
        senders = _senders(query.sender)
        checks.append(lambda ids: find_from(source, ids, senders))
    return checks


async def _find_checked(
    source: Source, wanted: Criteria, start: Start, checks: Sequence[Check], limit: int, budget: Budget
) -> tuple[list[FoundEmail], UUID | None]:
    """Like `find_emails`, but also applies the checks to the emails that it finds."""
    rows, below = await find_emails(source, wanted, limit=budget.most_checked, start=start, budget=budget)
    found: list[FoundEmail] = []
    for first in range(0, len(rows), budget.checked):
        part = rows[first : first + budget.checked]
        ids = {row.email_id for row in part}
        for check in checks:
            ids &= await check(sorted(ids))
        found += [row for row in part if row.email_id in ids]
        if len(found) >= limit:
            is_last = below is None and found[limit - 1] is rows[-1]
            return found[:limit], None if is_last else found[limit - 1].email_id
    return found, below


def _recipient(text: str) -> str:
    recipient = Recipient.parse(text)
    if recipient.is_domain:
        raise InvalidEmail("recipient", "is not an address; to find a domain, use the filter for domains")
    return normalised(recipient.text)


def _domain(text: str) -> str:
    recipient = Recipient.parse(text if text.startswith("@") else f"@{text}")
    return normalised(f"@{recipient.text}")[1:]


def _senders(text: str) -> list[str]:
    """The forms in which a sender may be stored, in lower case: as given, and with the domain in Punycode."""
    recipient = Recipient.parse(text)
    given = (f"@{recipient.text}" if recipient.is_domain else recipient.text).lower()
    return list(dict.fromkeys([given, normalised(given)]))


def _id_at(instant: datetime) -> UUID:
    return lowest_id_at(max(instant, _EPOCH))
