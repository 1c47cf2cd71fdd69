"""Emails whose events are stored, and a sink that only keeps events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest

from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.events.intake import EventIntake, Stored
from dispatcher.store.connections import Pool, connect_async
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.outbox import Outbox
from tests.events.requests import ANN, AT
from tests.store.books import Books
from tests.store.results import result
from tests.store.suppressing import hasher_of


def event(email_id: UUID, what: EventKind | Bounce = EventKind.DELIVERED, **fields: Any) -> ProviderEvent:
    """An event that SendGrid reported about the only recipient."""
    kind, bounce = (EventKind.BOUNCED, what) if isinstance(what, Bounce) else (what, None)
    given = {"provider": "sendgrid", "happened_at": AT, "recipient": ANN, "bounce": bounce}
    return ProviderEvent(email_id=email_id, kind=kind, **{**given, **fields})


@dataclass
class Scene:
    """Emails in `url`, the worker's statements, and the intake of events."""

    books: Books
    store: LeaseStore
    pool: Pool
    url: str

    def __post_init__(self) -> None:
        self.intake = EventIntake(self.pool, SuppressionRules())

    async def tell(self, *events: ProviderEvent, **rules: Any) -> Stored:
        """Stores events; `rules` other than the usual ones may say what suppresses a recipient."""
        return await (EventIntake(self.pool, SuppressionRules(**rules)) if rules else self.intake).store(events)

    async def lease(self, *email_ids: UUID) -> list[Lease]:
        return await self.store.lease(self.books.keys(list(email_ids)), 60)

    async def make(self, status: Status, *providers: str, **fields: Any) -> UUID:
        """An email with a recorded attempt for each provider, or for SendGrid; the last attempt leads to the status."""
        if status is Status.PENDING:
            return self.books.enqueue_tried(**fields)[0]
        email_id = self.books.enqueue_one(**fields)
        (lease,) = await self.lease(email_id)
        if not providers and status is Status.SENDING:
            return email_id
        for number, provider in enumerate(providers or ("sendgrid",), start=1):
            then = status if number >= len(providers) else Status.SENDING
            more = {"provider": provider, "attempt_number": number, "error_type": "outcome_unknown", "error": "Lost."}
            assert await self.store.record([result(lease, then, **more)]) == {email_id}
        return email_id

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[Outbox]:
        async with await connect_async(self.url, name="test relay") as session:
            yield Outbox(session)

    def hash(self, address: str) -> bytes:
        return hasher_of(self.books.connection).hash(address)

    def seen(self, columns: str, table: str = "email_event") -> list[Any]:
        """The values of a column, or of several in tuples, of all rows of a table in the order of the first column."""
        statement = " ".join(("select", columns, "from", table, "order by 1 nulls last"))
        rows = self.books.connection.execute(statement.encode()).fetchall()
        return [row[0] if len(row) == 1 else row for row in rows]


@pytest.fixture
def scene(books: Books, store: LeaseStore, pool: Pool, tables_url: str) -> Scene:
    return Scene(books, store, pool, tables_url)


@dataclass
class Recorder:
    """A sink that keeps the events of each call of `store`, or raises the next fault."""

    batches: list[list[ProviderEvent]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)

    async def store(self, events: Sequence[ProviderEvent]) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.batches.append(list(events))
