"""Emails of many requests into the tables, in one statement: what the HTTP API enqueues.

Where an application enqueues on its own connection (`producers`), the relay publishes; the API publishes what it has
inserted itself, and leaves to the relay what it did not come to.
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
    Key,
    attachment_parameters,
    has_attachments,
    holders,
    insert_parameters,
    key_parameters,
)
from dispatcher.store.queries import ids_with
from dispatcher.store.statements import fetch

LARGE_OCTETS: Final = 4 * 1024 * 1024
"""From here on a session ends with its statement: libpq keeps a buffer of its largest statement as long as it lives."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of some drafts.

    Attributes:
        due_at: By id, those whose key was new, and when the relay publishes each.
        known: For every other key, the id and payload hash of the email that holds it.
    """

    due_at: Mapping[UUID, datetime]
    known: Mapping[Key, tuple[UUID, bytes]]


class DraftStore:
    """The statements of a process that enqueues for others; each commits before it returns."""

    def __init__(self, pool: Pool, *, publish_in_seconds: float) -> None:
        """
        Args:
            publish_in_seconds: When the relay publishes what nobody has marked as announced until then.
        """
        self._pool = pool
        self._publish_in_seconds = publish_in_seconds

    async def insert(self, drafts: Sequence[Draft]) -> Insertion:
        """Inserts the drafts whose keys are new, all or none.

        Raises:
            StoreBusy: another transaction is inserting one of the keys and has not ended; none is inserted.
            StoreUnavailable: nobody knows whether they are inserted; the same call again finds out.
            DispatcherError: PostgreSQL refuses one of them; none is inserted.
        """
        async with session(self._pool) as connection:
            async with AsyncExitStack() as transaction:
                if has_attachments(drafts):
                    await transaction.enter_async_context(connection.transaction())
                parameters = insert_parameters(drafts, publish_in_seconds=self._publish_in_seconds)
                rows = await fetch(connection, "enqueue", parameters)
                due_at: dict[UUID, datetime] = {row[0]: row[1] for row in rows}
                if attachments := attachment_parameters(drafts, set(due_at)):
                    await fetch(connection, "enqueue_attachments", attachments)
            known: Mapping[Key, tuple[UUID, bytes]] = {}
            if keys := key_parameters(drafts, set(due_at)):
                known = holders(await fetch(connection, "find_by_key", keys))
            if sum(parameters["octets"]) > LARGE_OCTETS:
                await connection.close()
            return Insertion(due_at, known)

    async def find(self, drafts: Sequence[Draft]) -> Mapping[Key, bytes]:
        """The payload hash that is stored for each key that is known."""
        parameters = key_parameters(drafts, set())
        rows = await fetch(self._pool, "find_by_key", parameters)
        return {key: payload_hash for key, (_, payload_hash) in holders(rows).items()}

    async def mark_announced(self, due: Mapping[UUID, datetime]) -> None:
        """A broker confirmed the messages of these emails, one at least, which were inserted as due then."""
        await fetch(self._pool, "mark_published", ids_with("due_ats", due))
