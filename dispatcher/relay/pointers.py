"""The messages of due emails: on their way to RabbitMQ, confirmed, and at last marked, mostly by somebody else.

    due ─look─▶ on the way ─▶ confirmed ─▶ a lease has taken the due mark off meanwhile: forgotten
                    │                  └─▶ nobody has, for a while, or there are many: marked, together
                    └ not confirmed: due, as it was

While workers keep up, a message is leased milliseconds after its confirm, and the lease takes the mark off in a write
that it makes anyway. Marking each batch at once would be a statement and a commit between two looks, and the lease
would wait for the rows that they hold. What is confirmed is remembered instead, with the instant since which it was
due: a look leaves it out as long as it is due since then. What becomes due again is due since another instant.

The memory outlives the session, not the process: the next leader publishes once more what was not marked, and a second
message is harmless.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from itertools import takewhile
from typing import Final
from uuid import UUID

from dispatcher.errors import BrokerUnavailable
from dispatcher.store.outbox import DuePointer, Outbox

BATCH: Final = 500
"""Messages per look."""
MARK_AFTER_SECONDS: Final = 0.5
"""Later than almost every lease where workers keep up; soon enough that a look finds few of ours."""


class Pointers:
    """What the leading relay knows of the messages that it wrote; used by one task."""

    def __init__(
        self,
        publish: Callable[[list[DuePointer]], Awaitable[list[bool]]],
        *,
        mark_after_seconds: float = MARK_AFTER_SECONDS,
    ) -> None:
        """
        Args:
            publish: Tells which were confirmed, or raises BrokerUnavailable: none was.
            mark_after_seconds: How long a lease may take the mark off before we do.
        """
        self._publish = publish
        self._mark_after_seconds = mark_after_seconds
        self._on_the_way: dict[UUID, datetime] = {}
        self._unmarked: dict[UUID, tuple[datetime, float]] = {}  # in the order of their confirms
        self._many = BATCH  # so many are marked at once, however soon
        self._calls: set[asyncio.Task[None]] = set()

    async def look(self, outbox: Outbox) -> int:
        """Begins to publish what is due and was not published, a batch at most; returns how many that are.

        Raises:
            BrokerUnavailable: of what was begun before. It is due, as it was.
        """
        self._note_ended()
        while len(self._on_the_way) > BATCH:
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
            self._note_ended()
        most = BATCH + len(self._on_the_way) + len(self._unmarked)
        rows = await outbox.find_publish_due(most)
        if len(rows) < most:
            self._forget_marked(rows)
        new = [row for row in rows if not self._is_known(row)]
        if new:
            self._begin(new[:BATCH])
        await self._mark_some(outbox)
        return min(len(new), BATCH)

    async def arrived(self) -> None:
        """Returns once everything that was begun is confirmed or known not to be; raises as `look` does."""
        if self._calls:
            await asyncio.wait(self._calls)
        self._note_ended()

    async def mark_all(self, outbox: Outbox) -> None:
        """Marks what is confirmed, now."""
        await self._mark(outbox, list(self._unmarked))

    async def close(self) -> None:
        """Waits for no confirm any more. A second call is harmless."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _is_known(self, row: DuePointer) -> bool:
        if self._on_the_way.get(row.email_id) == row.due_at:
            return True
        confirmed = self._unmarked.get(row.email_id)
        return confirmed is not None and confirmed[0] == row.due_at

    def _forget_marked(self, rows: list[DuePointer]) -> None:
        """Forgets what is not due any more, or since another instant: what the rows say, which are all that is due."""
        due = {row.email_id: row.due_at for row in rows} if self._unmarked else {}
        for email_id in [i for i, (due_at, _) in self._unmarked.items() if due.get(i) != due_at]:
            del self._unmarked[email_id]

    def _begin(self, rows: list[DuePointer]) -> None:
        self._on_the_way |= {row.email_id: row.due_at for row in rows}
        self._calls.add(asyncio.create_task(self._carry(rows)))

    async def _carry(self, rows: list[DuePointer]) -> None:
        try:
            confirmed = await self._publish(rows)
        finally:
            for row in rows:
                # Unless it became due again and is on the way a second time.
                if self._on_the_way.get(row.email_id) == row.due_at:
                    del self._on_the_way[row.email_id]
        now = time.monotonic()
        for row, is_confirmed in zip(rows, confirmed, strict=True):
            if is_confirmed:
                self._unmarked.pop(row.email_id, None)
                self._unmarked[row.email_id] = row.due_at, now

    def _note_ended(self) -> None:
        ended = [call for call in self._calls if call.done()]
        self._calls.difference_update(ended)
        faults = [fault for call in ended if (fault := call.exception())]
        for fault in faults:
            if not isinstance(fault, BrokerUnavailable):
                raise fault
        if faults:
            raise faults[0]

    async def _mark_some(self, outbox: Outbox) -> None:
        """Marks what nobody else does: all of it where there is much, or what has waited for long."""
        if len(self._unmarked) >= self._many:
            await self._mark(outbox, list(self._unmarked))
            return
        before = time.monotonic() - self._mark_after_seconds
        if old := [i for i, _ in takewhile(lambda item: item[1][1] <= before, self._unmarked.items())]:
            await self._mark(outbox, old)

    async def _mark(self, outbox: Outbox, email_ids: list[UUID]) -> None:
        if not email_ids:
            return
        due = {email_id: self._unmarked[email_id][0] for email_id in email_ids}
        locked = await outbox.mark_published(due)
        now = time.monotonic()
        self._many = BATCH + len(locked)  # else each look would try those again
        for email_id, due_at in due.items():
            if self._unmarked[email_id][0] == due_at:  # and was not confirmed meanwhile for another instant
                del self._unmarked[email_id]
                if email_id in locked:
                    self._unmarked[email_id] = due_at, now
