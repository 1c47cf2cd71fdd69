"""What the relay remembers of its messages, with a real outbox and no RabbitMQ."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

import psycopg

from dispatcher.relay.pointers import BATCH, Pointers
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import DuePointer, Outbox
from tests.store.books import Books


class CountingOutbox(Outbox):
    """Counts the statements that mark."""

    marks = 0

    async def mark_published(self, due: Mapping[UUID, datetime]) -> set[UUID]:
        """As the outbox does."""
        self.marks += 1
        return await super().mark_published(due)


async def confirm(due: list[DuePointer]) -> list[bool]:
    """RabbitMQ takes every message."""
    return [True] * len(due)


async def test_many_that_somebody_has_locked_are_not_tried_at_each_look(tables_url: str, books: Books) -> None:
    locked = books.enqueue(2 * BATCH)
    pointers = Pointers(confirm, mark_after_seconds=3600)
    async with await connect_async(tables_url, name="relay") as session:
        outbox = CountingOutbox(session)
        with psycopg.connect(tables_url) as person:
            person.execute("select from email_log where email_id = any(%s) for update", [locked])
            for _ in range(2):
                await pointers.look(outbox)
                await pointers.arrived()
            await pointers.look(outbox)
            tried = outbox.marks
            more = books.enqueue(BATCH - 1)
            found = [await pointers.look(outbox) for _ in range(3)]
            tried_again = outbox.marks - tried
            person.rollback()
        await pointers.arrived()
        await pointers.mark_all(outbox)
        left = await outbox.find_publish_due(len(locked) + len(more))
    await pointers.close()

    assert found == [len(more), 0, 0]
    assert (tried > 0, tried_again) == (True, 0)
    assert left == []
