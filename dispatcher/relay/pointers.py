"""The messages of due emails: on their way to RabbitMQ, confirmed, and at last marked, mostly by somebody else.

    due ─look─▶ on the way ─▶ confirmed ─▶ a lease has taken the due mark off meanwhile: forgotten
                    │                  └─▶ nobody has, for a while, or there are very many: marked, a batch at each look
                    └ not confirmed: due, as it was

A lease takes the mark off in a write that it makes anyway: milliseconds after the confirm while workers keep up, some
seconds after it where a burst waits in the queue. Marking first would be a second write to each row, and the lease
would wait for the rows that it holds. What is confirmed is remembered instead, with the instant since which it was due:
a look leaves it out as long as it is due since then. What becomes due again is due since another instant.

While little is remembered, each look is a full one: it reads all that is due from the start, and what is not there any
more is forgotten. In a burst that would be thousands of known rows at each look. A look then goes on from the instant
where the last one ended, and a full one comes as often as its share of our time allows. It finds what was committed
late, due since before that instant; the more is remembered, the later: after about the time that two workers need for
as many.

The memory outlives the session, not the process. A relay that ends without its last marks leaves up to MOST_UNMARKED
emails that its successor publishes once more. A second message is harmless: no lease is to be had, `find_standing` says
why, and it is acked, a batch at a time: some 50 µs of a worker and PostgreSQL each.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.broker.confirmed import ConfirmedMessages
from dispatcher.errors import BrokerUnavailable
from dispatcher.store.outbox import THE_START, DuePointer, Outbox

BATCH: Final = 500
"""Messages per look, and marks per statement; and as much as may be remembered while each look is a full one."""
MARK_AFTER_SECONDS: Final = 5.0
"""Later than the leases of a burst that workers drain; far below what an alarm calls late (60 s)."""
MOST_UNMARKED: Final = 30_000
"""Some 10 MB; and so many second messages at most, where a relay dies: a second or two of one worker's time."""
FULL_LOOK_SHARE: Final = 1 / 50
"""Of the time, where much is remembered; but what is to be marked waits for no longer than it has waited already."""


class Pointers:
    """What the leading relay knows of the messages that it wrote; used by one task."""

    def __init__(
        self,
        publish: Callable[[list[DuePointer]], Awaitable[list[bool]]],
        *,
        mark_after_seconds: float = MARK_AFTER_SECONDS,
        most_unmarked: int = MOST_UNMARKED,
        full_look_share: float = FULL_LOOK_SHARE,
    ) -> None:
        """
        Args:
            publish: Tells which were confirmed, or raises BrokerUnavailable: none was.
            mark_after_seconds: How long a lease may take the mark off before we do.
            most_unmarked: Of more than that, the oldest are marked sooner; what is locked does not count.
            full_look_share: How much of the time full looks may take where much is remembered.
        """
        self._publish = publish
        self._mark_after_seconds = mark_after_seconds
        self._most_unmarked = most_unmarked
        self._full_look_share = full_look_share
        self._on_the_way: dict[UUID, datetime] = {}
        self._confirmed = ConfirmedMessages()
        self._goes_on_from = THE_START
        self._rows_there = 0  # that the last look saw at that instant
        self._looked_fully_at = 0.0
        self._full_look_at = 0.0
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def are_on_the_way(self) -> bool:
        """Whether some were written and RabbitMQ has not answered yet."""
        return bool(self._on_the_way)

    async def look(self, outbox: Outbox, *, is_last: bool = False) -> int:
        """Begins to publish what is due and was not published, a batch at most; returns how many that are.

        Args:
            is_last: Return 0 only if a full look found nothing.

        Raises:
            BrokerUnavailable: of what was begun before. It is due, as it was.
        """
        self._note_ended()
        while len(self._on_the_way) > BATCH:
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
            self._note_ended()
        goes_on = len(self._confirmed) > BATCH and time.monotonic() < self._full_look_at
        new = await self._go_on(outbox) if goes_on else []
        if not goes_on or (is_last and not new):
            new = await self._look_fully(outbox)
        if new:
            self._on_the_way |= {row.email_id: row.due_at for row in new}
            self._calls.add(asyncio.create_task(self._carry(new)))
        # Marks what nobody else does, a batch at most: neither a look nor a lease waits for more. Only what a full look
        # has found due when it was old enough; else most of what is tried might be leased already.
        before = self._looked_fully_at - self._mark_after_seconds
        if due := self._confirmed.to_mark(before, BATCH, most_waiting=self._most_unmarked):
            await self._mark(outbox, due)
        return len(new)

    async def arrived(self) -> None:
        """Returns once everything that was begun is confirmed or known not to be; raises as `look` does."""
        if self._calls:
            await asyncio.wait(self._calls)
        self._note_ended()

    async def mark_all(self, outbox: Outbox) -> None:
        """Marks what is confirmed, now, some at a time: what is done counts, if it is cut off."""
        left = list(self._confirmed.to_mark(math.inf, len(self._confirmed)).items())
        for start in range(0, len(left), BATCH):
            await self._mark(outbox, dict(left[start : start + BATCH]))

    async def close(self) -> None:
        """Waits for no confirm any more. A second call is harmless."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _go_on(self, outbox: Outbox) -> list[DuePointer]:
        while True:
            most = BATCH + self._rows_there
            rows = await outbox.find_publish_due(most, since=self._goes_on_from)
            new = self._leave_out_known(rows)
            # A whole look of known ones: what a full look found behind them was more than a batch.
            if new or len(rows) < most:
                return new

    async def _look_fully(self, outbox: Outbox) -> list[DuePointer]:
        self._looked_fully_at = time.monotonic()
        most = BATCH + len(self._on_the_way) + len(self._confirmed)
        rows = await outbox.find_publish_due(most)
        due = {row.email_id: row.due_at for row in rows}
        self._confirmed.forget_all_but(due, until=rows[-1].due_at if len(rows) == most else None)
        new = self._leave_out_known(rows)
        now = time.monotonic()
        pause = (now - self._looked_fully_at) / self._full_look_share
        self._full_look_at = now + min(pause, self._mark_after_seconds)
        return new

    def _leave_out_known(self, rows: list[DuePointer]) -> list[DuePointer]:
        """The rest of a look's rows, a batch at most. The next look goes on from the last of these, or of all."""
        new = [
            row
            for row in rows
            if self._on_the_way.get(row.email_id) != row.due_at and not self._confirmed.knows(row.email_id, row.due_at)
        ]
        if rows:
            last = new[BATCH - 1] if len(new) > BATCH else rows[-1]
            self._goes_on_from = last.due_at
            self._rows_there = sum(row.due_at == last.due_at for row in rows)
        return new[:BATCH]

    async def _carry(self, rows: list[DuePointer]) -> None:
        confirmed = [False] * len(rows)
        try:
            confirmed = await self._publish(rows)
        finally:
            for row in rows:
                # Unless it became due again and is on the way a second time.
                if self._on_the_way.get(row.email_id) == row.due_at:
                    del self._on_the_way[row.email_id]
            due = {row.email_id: row.due_at for row, is_confirmed in zip(rows, confirmed, strict=True) if is_confirmed}
            self._confirmed.add(due, time.monotonic())
            if not all(confirmed):
                self._full_look_at = 0.0  # they are due, and behind us

    def _note_ended(self) -> None:
        ended = [call for call in self._calls if call.done()]
        self._calls.difference_update(ended)
        faults = [fault for call in ended if (fault := call.exception())]
        for fault in faults:
            if not isinstance(fault, BrokerUnavailable):
                raise fault
        if faults:
            raise faults[0]

    async def _mark(self, outbox: Outbox, due: Mapping[UUID, datetime]) -> None:
        locked = await outbox.mark_published(due)
        self._confirmed.tried(due, time.monotonic(), locked=locked)
