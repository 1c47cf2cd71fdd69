"""Inserts the emails of many HTTP API requests in one statement.

If an application enqueues on its own connection (`producers`), the relay publishes the emails. The API process itself
publishes the emails that it inserts; the relay publishes only those that the API process could not publish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.store.connections import Pool, session
from dispatcher.store.enqueueing import (
    Draft,
    Holders,
    Key,
    attachment_parameters,
    has_attachments,
    holders,
    insert_parameters,
    key_parameters,
    octets_of,
)
from dispatcher.store.queries import ids_with
from dispatcher.store.statements import fetch

LARGE_OCTETS: Final = 4 * 1024 * 1024
"""The session is closed after a statement that is larger than this, because libpq keeps a buffer as large as the
largest statement."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """The result of inserting drafts, by email id."""

    # when the relay publishes the email if the API process has not; None: not before its send_at
    due_at: Mapping[UUID, datetime | None]
    direct_lane: Mapping[UUID, str]  # the lane of each email that the API process itself must publish
    known: Holders  # the emails of the keys that already existed


class DraftStore:
    """Inserts emails for a process of the HTTP API. Each method commits before it returns."""

    def __init__(self, pool: Pool, *, publish_in_seconds: float) -> None:
        """`publish_in_seconds`: how long the API process has to publish an email. Then the relay publishes the email,
        unless `mark_published` was called."""
        self._pool = pool
        self._publish_in_seconds = publish_in_seconds

    async def insert(
        self, drafts: Sequence[Draft], *, direct_lanes: Sequence[str] = (), relay_tenants: Sequence[str] = ()
    ) -> Insertion:
        """Inserts the drafts whose keys are new: either all of them or none. Other parameters: see `insert_parameters`.

        Raises StoreBusy, and has inserted nothing, if another open transaction is inserting one of the keys. After
        StoreUnavailable, it is unknown whether the drafts were inserted: repeat the call to find out. After any other
        DispatcherError, PostgreSQL refuses one of the drafts, and nothing was inserted.
        """
        async with session(self._pool) as connection:
            async with AsyncExitStack() as transaction:
                if has_attachments(drafts):
                    await transaction.enter_async_context(connection.transaction())
                parameters = insert_parameters(
                    drafts,
                    publish_in_seconds=self._publish_in_seconds,
                    direct_lanes=direct_lanes,
                    relay_tenants=relay_tenants,
                )
                rows = await fetch(connection, "enqueue" if len(drafts) > 1 else "enqueue_one", parameters)
                due_at: dict[UUID, datetime | None] = {row[0]: row[1] for row in rows}
                if attachments := attachment_parameters(drafts, set(due_at)):
                    await fetch(connection, "enqueue_attachments", attachments)
            known: Holders = {}
            if keys := key_parameters(drafts, set(due_at)):
                known = holders(await fetch(connection, "find_by_key", keys))
            if sum(octets_of(item.email) for item in drafts) > LARGE_OCTETS:
                await connection.close()
            direct_lane = {row[0]: row[2] for row in rows if row[2] is not None}
            return Insertion(due_at, direct_lane, known)

    async def find(self, drafts: Sequence[Draft]) -> Mapping[Key, bytes | None]:
        """For each key that already exists, the payload hash of the draft that repeats its email; None if none does."""
        parameters = key_parameters(drafts, set())
        rows = await fetch(self._pool, "find_by_key", parameters)
        return {key: payload_hash for key, (_, payload_hash) in holders(rows).items()}

    async def mark_published(self, due: Mapping[UUID, datetime]) -> None:
        """Clears the due marks of emails whose messages RabbitMQ confirmed, so that the relay does not publish them
        again. `due`: the time in `Insertion.due_at`, by email id; at least one email."""
        await fetch(self._pool, "mark_published", ids_with("due_ats", due))
