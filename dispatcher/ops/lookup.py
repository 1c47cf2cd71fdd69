"""Searches for the emails that the action `find` selects. Recipients are found by their keyed hash."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.listed_email import ListedEmail
from dispatcher.domain.outcome import left_out
from dispatcher.domain.suppression import Recipient
from dispatcher.domain.values import replace
from dispatcher.store.address_hashes import AddressHasher, normalised
from dispatcher.store.lookup import (
    BUDGET,
    COLUMNS,
    HIGHEST,
    LOWEST,
    Budget,
    Criteria,
    Start,
    find_emails,
    find_from,
    find_recipients_since,
    find_start,
    find_with_domain,
    find_with_tag,
    hash_address,
)
from dispatcher.store.recipients import masked_recipients
from dispatcher.store.statements import Source

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""The earliest instant of a search, because email ids contain no earlier time."""

Check = Callable[[Sequence[UUID]], Awaitable[set[UUID]]]


class Found(NamedTuple):
    """A page of emails; see `actions.emails.FoundPage`. `next` is the cursor of the next page."""

    rows: list[ListedEmail]
    next: UUID | None
    was_cut: bool
    recipients_since: datetime | None


async def find(
    source: Source, filters: Mapping[str, Any], *, limit: int = 50, after: UUID | None = None, budget: Budget = BUDGET
) -> Found:
    """A page of the emails that match. The cost is about the same for every filter, however many emails there are.

    The cursor is sealed: it can be the id of another tenant's email, which also shows when that email was enqueued.

    Args:
        filters: Values of the fields of the action. Must not be logged, because some are addresses.
    """
    asked = {name: value for name, value in filters.items() if value is not None}
    hasher, reader = await AddressHasher.open(source), asked.get("tenant_id", "")
    wanted = await _criteria(source, asked, None if after is None else hasher.unsealed(after, reader))
    start = find_start(wanted)
    checks = _checks(source, asked, wanted, start)
    if checks:
        rows, below = await _find_checked(source, wanted, start, checks, limit, budget)
    else:
        rows, below = await find_emails(source, wanted, limit=limit, start=start, budget=budget)
    since = await find_recipients_since(source) if {"recipient", "domain"} & asked.keys() else None
    recipients = await masked_recipients(source, [row.id for row in rows])
    was_cut = below is not None and len(rows) < limit
    shown = [_shown(row, recipients.get(row.id)) for row in rows]
    return Found(shown, None if below is None else hasher.sealed(below, reader), was_cut, since)


def _shown(row: ListedEmail, recipients: Sequence[str] | None) -> ListedEmail:
    """The row with recipients, and without the provider's answer if it is no error, such as `250 OK`."""
    if row.error_type is not None:
        return replace(row, recipients=recipients)
    return replace(row, recipients=recipients, error=None, refused_recipients=left_out(row.error))


async def _criteria(source: Source, asked: Mapping[str, Any], below: UUID | None) -> Criteria:
    recipient = domain = None
    if "recipient" in asked:
        address = normalised(Recipient.parse(asked["recipient"]).text)
        recipient = (await hash_address(source, address), address.rpartition("@")[2] if "@" in address else "")
    if "domain" in asked:
        domain = normalised(f"@{Recipient.parse('@' + asked['domain'].removeprefix('@')).text}")[1:]
    return Criteria(
        recipient=recipient,
        domain=domain,
        below_id=min(_id_at(asked["created_before"]) if "created_before" in asked else HIGHEST, below or HIGHEST),
        from_id=_id_at(asked["created_from"]) if "created_from" in asked else LOWEST,
        **{name: asked[name] for name in COLUMNS if name in asked},
    )


def _checks(source: Source, asked: Mapping[str, Any], wanted: Criteria, start: Start) -> list[Check]:
    """Functions for the filters that `find_emails` does not apply: from ids of emails to the ids that match."""
    checks: list[Check] = []
    if (domain := wanted.domain) is not None and start is not Start.DOMAIN:
        checks.append(lambda ids: find_with_domain(source, ids, domain))
    if "tag" in asked:
        checks.append(lambda ids: find_with_tag(source, ids, asked["tag"]))
    if "sender" in asked:
        senders = _senders(asked["sender"])
        checks.append(lambda ids: find_from(source, ids, senders))
    return checks


async def _find_checked(
    source: Source, wanted: Criteria, start: Start, checks: Sequence[Check], limit: int, budget: Budget
) -> tuple[list[ListedEmail], UUID | None]:
    """Like `find_emails`, but also applies the checks to the emails that it finds."""
    rows, below = await find_emails(source, wanted, limit=budget.most_checked, start=start, budget=budget)
    found: list[ListedEmail] = []
    for first in range(0, len(rows), budget.checked):
        part = rows[first : first + budget.checked]
        ids = {row.id for row in part}
        for check in checks:
            ids &= await check(sorted(ids))
        found += [row for row in part if row.id in ids]
        if len(found) >= limit:
            is_last = below is None and found[limit - 1] is rows[-1]
            return found[:limit], None if is_last else found[limit - 1].id
    return found, below


def _senders(text: str) -> list[str]:
    """The forms in which a sender may be stored, in lower case: as given, and with the domain in Punycode."""
    recipient = Recipient.parse(text)
    given = (f"@{recipient.text}" if recipient.is_domain else recipient.text).lower()
    return list(dict.fromkeys([given, normalised(given)]))


def _id_at(instant: datetime) -> UUID:
    return lowest_id_at(max(instant, _EPOCH))
