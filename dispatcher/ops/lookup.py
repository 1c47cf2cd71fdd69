"""Searches for the emails that the action `find` selects: by recipient, domain, correlation id and other properties.

Recipients are found by their keyed hash. See sql/queries/lookup.sql.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.event import DELIVERY_FILTERS, TROUBLE
from dispatcher.domain.listed_email import ListedEmail
from dispatcher.domain.outcome import left_out
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import Recipient
from dispatcher.domain.values import dataclass, replace
from dispatcher.store.address_hashes import AddressHasher, normalised
from dispatcher.store.emails import find_details, find_envelopes
from dispatcher.store.queries import ids_within
from dispatcher.store.recipients import masked_recipients
from dispatcher.store.statements import Source, fetch, from_rows

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""The earliest instant of a search, because email ids contain no earlier time."""
_LOWEST: Final = UUID(int=0)
_HIGHEST: Final = UUID(int=2**128 - 1)
_COLUMNS: Final = ("correlation_id", "status", "provider", "error_type", "text", "tenant_id", "lane", "channel")
"""The filters that the statement compares with columns."""

Check = Callable[[set[UUID]], Awaitable[set[UUID]]]
"""A filter that `find_emails` does not apply: returns those of the ids that match."""


class Start(StrEnum):
    """The filter by which a search reads emails. The other filters are applied to the emails that were read."""

    RECIPIENT = "recipient"
    METADATA = "metadata"
    DOMAIN = "domain"
    CORRELATION_ID = "correlation_id"
    STATUS = "status"
    """Every status except `sent`, which has no index."""
    DELIVERY = "delivery"
    """The delivery states in TROUBLE."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one page of a search reads. With the defaults, a page takes some tens of milliseconds.

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


BUDGET: Final = Budget()


class Found(NamedTuple):
    """A page of emails; see `actions.emails.FoundPage`. `next` is the cursor of the next page."""

    rows: list[ListedEmail]
    next: UUID | None
    was_cut: bool
    recipients_since: datetime | None


async def find(
    source: Source,
    filters: Mapping[str, Any],
    *,
    limit: int = 50,
    after: UUID | None = None,
    sees_content: bool = False,
    budget: Budget = BUDGET,
) -> Found:
    """A page of the emails that match. The cost is about the same for every filter, however many emails there are.

    A page reads at most as many emails as its budget says, so a page with few or no emails is not necessarily the last
    page. The cursor is sealed: it can be the id of another tenant's email, which also shows when that email was
    enqueued.

    `filters`, the values of the action's fields, must not be logged, because some are addresses.
    """
    asked = {name: value for name, value in filters.items() if value is not None}
    hasher, reader = await AddressHasher.open(source), asked.get("tenant_id", "")
    start, address_hash, domain = _start(asked), None, None
    if "domain" in asked:
        domain = normalised(f"@{Recipient.parse('@' + asked['domain'].removeprefix('@')).text}")[1:]
    recipient_domain = domain if start is Start.DOMAIN else None
    delivery = asked.get("delivery", "")
    if "recipient" in asked:
        address = normalised(Recipient.parse(asked["recipient"]).text)
        ((address_hash,),) = await fetch(source, "hash_address", {"address": address})
        recipient_domain = address.rpartition("@")[2] if "@" in address else ""
    metadata = orjson.dumps(dict([asked["metadata"].split("=", 1)])).decode() if "metadata" in asked else None
    is_read = start is Start.METADATA
    checks = _checks(source, asked, None if start is Start.DOMAIN else domain, None if is_read else metadata)
    most = budget.most_checked if checks else limit
    by_id = (Start.RECIPIENT, Start.METADATA, Start.DOMAIN, Start.DELIVERY)
    examined = budget.emails if start in by_id else budget.rows
    compared = asked.keys() & {*_COLUMNS, "delivery"}
    if compared <= {start.value} - {Start.DELIVERY.value}:  # every email that the statement reads matches
        examined = min(most, examined)
    parameters = {
        **{name: asked.get(name) for name in _COLUMNS},
        "start": start.value,
        "deliveries": [*DELIVERY_FILTERS[delivery]] if delivery else None,
        "event_kind": TROUBLE.get(delivery),
        "address_hash": address_hash,
        "recipient_domain": recipient_domain,
        "wanted_metadata": metadata if is_read else None,
        "below_id": min(
            _id_at(asked["created_before"]) if "created_before" in asked else _HIGHEST,
            _HIGHEST if after is None else hasher.unsealed(after, reader),
        ),
        "from_id": _id_at(asked["created_from"]) if "created_from" in asked else _LOWEST,
        "limit": most,
        "examined": examined,
    }
    answer = await fetch(source, "find_emails", parameters)
    rows = from_rows(ListedEmail, [row[:-1] for row in answer if row[0] is not None])
    below: UUID | None = rows[-1].id if len(rows) == most else answer[0][-1]
    if checks:
        rows, below = await _checked(rows, below, checks, limit, budget)
    return Found(
        await _shown(source, rows, sees_content=sees_content),
        None if below is None else hasher.sealed(below, reader),
        below is not None and len(rows) < limit,
        await _recipients_since(source) if {"recipient", "domain"} & asked.keys() else None,
    )


def _start(asked: Mapping[str, Any]) -> Start:
    for start in (Start.RECIPIENT, Start.CORRELATION_ID, Start.METADATA, Start.DOMAIN):
        if start in asked:
            return start
    if asked.get("delivery") in TROUBLE:
        return Start.DELIVERY
    return Start.STATUS if asked.get("status", Status.SENT) != Status.SENT else Start.ALL


def _checks(source: Source, asked: Mapping[str, Any], domain: str | None, metadata: str | None) -> list[Check]:
    checks: list[Check] = []
    if domain is not None:
        checks.append(lambda ids: _matching(source, "find_with_domain", ids, {"domain": domain}))
    if "tag" in asked:
        checks.append(lambda ids: _matching(source, "find_with_tag", ids, {"tag": asked["tag"]}))
    if metadata is not None:
        checks.append(lambda ids: _matching(source, "find_with_metadata", ids, {"metadata": metadata}))
    if "sender" in asked:  # stored as given, or with the domain in Punycode; the statement compares in lower case
        recipient = Recipient.parse(asked["sender"])
        given = (f"@{recipient.text}" if recipient.is_domain else recipient.text).lower()
        senders = list(dict.fromkeys([given, normalised(given)]))
        checks.append(lambda ids: _matching(source, "find_from", ids, {"senders": senders}))
    return checks


async def _matching(source: Source, name: str, ids: set[UUID], parameters: dict[str, Any]) -> set[UUID]:
    return {row[0] for row in await fetch(source, name, {**ids_within(ids), **parameters})} if ids else set()


async def _checked(
    rows: Sequence[ListedEmail], below: UUID | None, checks: Sequence[Check], limit: int, budget: Budget
) -> tuple[list[ListedEmail], UUID | None]:
    """Applies the checks to the emails that were read, until `limit` emails match."""
    found: list[ListedEmail] = []
    for first in range(0, len(rows), budget.checked):
        part = rows[first : first + budget.checked]
        ids = {row.id for row in part}
        for check in checks:
            ids = await check(ids)
        found += [row for row in part if row.id in ids]
        if len(found) >= limit:
            is_last = below is None and found[limit - 1] is rows[-1]
            return found[:limit], None if is_last else found[limit - 1].id
    return found, below


async def _recipients_since(source: Source) -> datetime | None:
    ((since, has_older),) = await fetch(source, "find_recipients_since")
    return since if has_older else None


async def _shown(source: Source, rows: Sequence[ListedEmail], *, sees_content: bool) -> list[ListedEmail]:
    ids = [row.id for row in rows]
    recipients, details = await masked_recipients(source, ids), await find_details(source, ids)
    envelopes = await find_envelopes(source, ids) if sees_content else {}
    shown = []
    for row in rows:
        tags, metadata, last_event = details.get(row.id, (None, None, None))
        # Without an error type, the column has the provider's answer, such as `250 OK`.
        is_answer = row.error_type is None
        shown.append(
            replace(
                row,
                error=None if is_answer else row.error,
                answer=row.error if is_answer else None,
                refused_recipients=left_out(row.error) if is_answer else None,
                recipients=recipients.get(row.id),
                envelope=envelopes.get(row.id),
                tags=tags,
                metadata=metadata,
                last_event=last_event,
            )
        )
    return shown


def _id_at(instant: datetime) -> UUID:
    return lowest_id_at(max(instant, _EPOCH))
