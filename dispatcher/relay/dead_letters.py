"""Dead letters: emails that failed or are held, from their rows to the DLQ."""

from __future__ import annotations

import time
from typing import Final

from dispatcher.broker.outgoing import Outgoing
from dispatcher.relay.pointers import BATCH
from dispatcher.relay.queue_writer import QueueWriter
from dispatcher.store.outbox import DueDeadLetter, Outbox
from dispatcher.telemetry.log import get_log

LOOK_SECONDS: Final = 0.25
"""Nobody waits for a dead letter."""


class DeadLetters:
    """Publishes dead letters, one batch at a time, and marks what was confirmed."""

    def __init__(self, writer: QueueWriter, dlq: str) -> None:
        self._writer = writer
        self._dlq = dlq
        self._look_at = 0.0

    async def look(self, outbox: Outbox, *, is_last: bool) -> bool:
        """Publishes what is due, now and then, and at once after some. Returns whether it published all that it found.

        Args:
            is_last: Look now.

        Raises:
            BrokerUnavailable: all are due, as they were.
        """
        now = time.monotonic()
        if not self._writer.is_open or (now < self._look_at and not is_last):
            return False
        due = await _without_locked(outbox, await outbox.find_dead_letter_due(BATCH + len(outbox.locked)))
        self._look_at = 0.0 if due else now + LOOK_SECONDS
        if not due:
            return False
        confirmed = await self._writer.publish(
            [Outgoing.of_dead_letter(self._dlq, row, row.traceparent) for row in due]
        )
        if count := self._writer.count(confirmed):
            due_at = {row.email_id: row.failed_at for row, is_out in zip(due, confirmed, strict=True) if is_out}
            await outbox.mark_dead_lettered(due_at)
            get_log().info("relay.dead_lettered", count=count)
        return count == len(due)


async def _without_locked(outbox: Outbox, due: list[DueDeadLetter]) -> list[DueDeadLetter]:
    """Leaves out what could not be marked after it was published: there would be a copy per look."""
    locked = await outbox.locked.among([row.email_id for row in due])
    return [row for row in due if row.email_id not in locked] if locked else due
