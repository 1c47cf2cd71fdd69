"""Publishes the messages of due emails, and later clears the due marks that no lease has cleared.

    due ─scan─▶ unconfirmed ─▶ confirmed ─▶ a lease has cleared the due mark: forgotten
                    │                  └─▶ no lease has cleared it for a while, or too many emails are remembered: the
                    │                      relay clears it, a batch per round
                    └ not confirmed: still due

A worker's lease statement writes the row anyway, and clears the due mark in the same write: milliseconds after the
confirm while workers keep up, some seconds later during a burst. If the relay cleared the marks first, each row would
be written twice, and the lease statement would wait for row locks. So the relay remembers each confirmed email with its
due time, and skips the email while the due time is unchanged. If the email becomes due again, its due time differs.

While few emails are remembered, each round scans all due rows from the start, and forgets emails that are no longer
due. During a burst, such a scan would read thousands of known rows. The relay then continues at the due time where the
last scan ended. A full scan still runs at intervals, limited to a share of the relay's time. It finds rows that were
committed late, with an earlier due time. The more emails are remembered, the longer the interval: about the time that
two workers need for that number of emails.

The list of remembered emails outlives the database session, but not the process. If a relay exits before it has cleared
all marks, the next relay publishes up to MAX_UNMARKED emails again. A second message is harmless: it gets no lease,
`find_unleased` shows why, and the worker acks it. That costs a worker and PostgreSQL about 50 µs each per message.
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
"""The most emails per round, and the most due marks per statement. While the relay remembers more emails than this, not
every scan is a full scan."""
MARK_AFTER_SECONDS: Final = 5.0
"""How long the relay waits before it clears a due mark itself. A lease also clears the mark, and workers that keep up
lease sooner. Far below the alarm threshold (60 s)."""
MAX_UNMARKED: Final = 30_000
"""The most published emails with a due mark that the relay remembers: about 10 MB. If a relay dies, at most this many
messages are duplicates, which cost a worker one or two seconds."""
FULL_SCAN_SHARE: Final = 1 / 50
"""The share of the relay's time for full scans while many emails are remembered. A full scan is never later than
`mark_after_seconds`."""


class PointerPublisher:
    """Publishes due emails, and remembers them until their due mark is cleared. For one task."""

    def __init__(
        self,
        publish: Callable[[list[DuePointer]], Awaitable[list[bool]]],
        *,
        mark_after_seconds: float = MARK_AFTER_SECONDS,
        max_unmarked: int = MAX_UNMARKED,
        full_scan_share: float = FULL_SCAN_SHARE,
    ) -> None:
        """
        Args:
            publish: Publishes a batch; returns which emails were confirmed, or raises BrokerUnavailable if none was.
            mark_after_seconds: How long to wait for a lease to clear the due mark.
            max_unmarked: If more emails are remembered, the oldest marks are cleared sooner. Locked rows do not count.
            full_scan_share: The share of time for full scans while many emails are remembered.
        """
        self._publish = publish
        self._mark_after_seconds = mark_after_seconds
        self._max_unmarked = max_unmarked
        self._full_scan_share = full_scan_share
        self._unconfirmed: dict[UUID, datetime] = {}
        self._confirmed = ConfirmedMessages()
        self._resume_from = THE_START
        self._rows_at_resume = 0  # rows of the last scan with this due time
        self._full_scan_began_at = 0.0
        self._full_scan_due_at = 0.0
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def has_unconfirmed(self) -> bool:
        """Whether RabbitMQ has yet to confirm a published message."""
        return bool(self._unconfirmed)

    async def publish_due(self, outbox: Outbox, *, is_last: bool = False) -> int:
        """Starts to publish a batch of due emails; returns how many.

        Args:
            is_last: Return 0 only if a full scan found nothing.

        Raises:
            BrokerUnavailable: An earlier batch failed. Its emails are still due.
        """
        self._note_ended()
        while len(self._unconfirmed) > BATCH:
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
            self._note_ended()
        is_burst = len(self._confirmed) > BATCH and time.monotonic() < self._full_scan_due_at
        new = await self._scan_onward(outbox) if is_burst else []
        if not is_burst or (is_last and not new):
            new = await self._scan_fully(outbox)
        if new:
            self._unconfirmed |= {row.email_id: row.due_at for row in new}
            self._calls.add(asyncio.create_task(self._publish_batch(new)))
        # Clear marks that no lease has cleared: at most one batch, so that scans and leases wait only briefly. Clear
        # only the marks of emails that a full scan has found still due, because most other emails may be leased
        # already.
        before = self._full_scan_began_at - self._mark_after_seconds
        if due := self._confirmed.to_mark(before, BATCH, most_waiting=self._max_unmarked):
            await self._mark(outbox, due)
        return len(new)

    async def wait_confirmed(self) -> None:
        """Returns when RabbitMQ has confirmed or refused every message. Raises the same errors as `publish_due`."""
        if self._calls:
            await asyncio.wait(self._calls)
        self._note_ended()

    async def mark_all(self, outbox: Outbox) -> None:
        """Clears the due marks of all confirmed emails now, in batches. If cancelled, finished batches stay cleared."""
        left = list(self._confirmed.to_mark(math.inf, len(self._confirmed)).items())
        for start in range(0, len(left), BATCH):
            await self._mark(outbox, dict(left[start : start + BATCH]))

    async def close(self) -> None:
        """Cancels all open publishes. Idempotent."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _scan_onward(self, outbox: Outbox) -> list[DuePointer]:
        while True:
            most = BATCH + self._rows_at_resume
            rows = await outbox.find_publish_due(most, since=self._resume_from)
            new = self._leave_out_known(rows)
            # If every row of a full page is known, because the last full scan read further, read the next page.
            if new or len(rows) < most:
                return new

    async def _scan_fully(self, outbox: Outbox) -> list[DuePointer]:
        self._full_scan_began_at = time.monotonic()
        most = BATCH + len(self._unconfirmed) + len(self._confirmed)
        rows = await outbox.find_publish_due(most)
        due = {row.email_id: row.due_at for row in rows}
        self._confirmed.retain(due, until=rows[-1].due_at if len(rows) == most else None)
        new = self._leave_out_known(rows)
        now = time.monotonic()
        pause = (now - self._full_scan_began_at) / self._full_scan_share
        self._full_scan_due_at = now + min(pause, self._mark_after_seconds)
        return new

    def _leave_out_known(self, rows: list[DuePointer]) -> list[DuePointer]:
        """The new rows of a scan, at most one batch. The next scan continues at the last row that was handled."""
        new = [
            row
            for row in rows
            if self._unconfirmed.get(row.email_id) != row.due_at
            and not self._confirmed.contains(row.email_id, row.due_at)
        ]
        if rows:
            last = new[BATCH - 1] if len(new) > BATCH else rows[-1]
            self._resume_from = last.due_at
            self._rows_at_resume = sum(row.due_at == last.due_at for row in rows)
        return new[:BATCH]

    async def _publish_batch(self, rows: list[DuePointer]) -> None:
        confirmed = [False] * len(rows)
        try:
            confirmed = await self._publish(rows)
        finally:
            for row in rows:
                # Forget the row, unless the email became due again and is being published a second time.
                if self._unconfirmed.get(row.email_id) == row.due_at:
                    del self._unconfirmed[row.email_id]
            due = {row.email_id: row.due_at for row, is_confirmed in zip(rows, confirmed, strict=True) if is_confirmed}
            self._confirmed.add(due, time.monotonic())
            if not all(confirmed):
                self._full_scan_due_at = 0.0  # unconfirmed emails are still due, with earlier due times

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
        self._confirmed.discard(due, time.monotonic(), locked=locked)
