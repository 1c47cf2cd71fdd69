"""Leases new emails, and creates results in the form in which a worker passes them to the store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dispatcher.domain.status import Status
from dispatcher.store.leases import Lease, LeaseStore, Result
from tests.store.books import Books

_OUTCOMES = {
    Status.SENT: "accepted",
    Status.SENDING: "deferred",
    Status.FAILED: "rejected",
    Status.HELD: "uncertain",
    Status.PENDING: "uncertain",
    Status.WAITING: "deferred",
}
RECORDABLE = frozenset(_OUTCOMES)
"""The statuses that an attempt can lead to."""


async def lease_some(store: LeaseStore, books: Books, count: int, seconds: float = 60, **fields: Any) -> list[Lease]:
    leases = await store.lease(books.keys(books.enqueue(count, **fields)), seconds)
    return sorted(leases, key=lambda lease: lease.email_id)


async def lease_one(store: LeaseStore, books: Books, **fields: Any) -> Lease:
    return (await lease_some(store, books, 1, **fields))[0]


def result(lease: Lease, status: Status, **fields: Any) -> Result:
    """The result of an attempt under a lease. Without an outcome in `fields`, the outcome follows from the status."""
    now = datetime.now(UTC)
    plain = Result(
        email_id=lease.email_id,
        lease_token=lease.token,
        status=status,
        attempt_number=lease.attempt_number,
        started_at=now,
        finished_at=now,
        outcome=_OUTCOMES[status],
        provider="smtp",
        lease_seconds=60.0 if status is Status.SENDING else None,
        wait_seconds=60.0 if status is Status.WAITING else None,
    )
    return plain._replace(**fields)
