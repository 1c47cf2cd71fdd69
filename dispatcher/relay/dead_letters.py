"""Publishes failed and held emails to the DLQ, as dead letters."""

from __future__ import annotations

import time
from typing import Final

from dispatcher.broker.outgoing import Outgoing
from dispatcher.relay.pointers import BATCH
from dispatcher.relay.queues import QueueWriter
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry.log import get_log

POLL_SECONDS: Final = 0.25
"""How often the relay looks for due dead letters. No notification announces them, because they are not urgent."""


class DeadLetterPublisher:
    """Publishes due dead letters in batches, and clears the due marks of confirmed dead letters."""

    def __init__(self, writer: QueueWriter, dlq: str) -> None:
        self._writer = writer
        self._dlq = dlq
        self._next_poll_at = 0.0

    async def publish_due(self, outbox: Outbox, *, is_last: bool) -> bool:
        """Publishes a batch of due dead letters. Returns whether there were some and all were published. After a call
        that found none, calls within POLL_SECONDS do nothing, unless `is_last`. Raises BrokerUnavailable if RabbitMQ
        confirmed no message."""
        now = time.monotonic()
        if not self._writer.is_open or (now < self._next_poll_at and not is_last):
            return False
        due = await outbox.find_dead_letter_due(BATCH + len(outbox.locked))
        # Leave out locked rows: their due marks cannot be cleared, so every round would publish them again.
        locked = await outbox.locked.find_locked([row.email_id for row in due])
        due = [row for row in due if row.email_id not in locked]
        self._next_poll_at = 0.0 if due else now + POLL_SECONDS
        if not due:
            return False
        confirmed = await self._writer.write([Outgoing.of_dead_letter(self._dlq, row, row.traceparent) for row in due])
        if count := self._writer.count(confirmed):
            written = (row for row, is_confirmed in zip(due, confirmed, strict=True) if is_confirmed)
            await outbox.mark_dead_lettered({row.email_id: row.failed_at for row in written})
            get_log().info("relay.dead_lettered", count=count)
        return count == len(due)
