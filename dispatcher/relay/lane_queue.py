"""Publishes emails to the send queue of a lane, and limits how many emails are on the queue."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.broker.credit import QueueCredit
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.relay.queue_writer import QueueWriter
from dispatcher.store.outbox import DuePointer
from dispatcher.telemetry.log import get_log


class LaneQueue:
    """Publishes emails to the send queue of a lane, and limits how many emails are on the queue."""

    def __init__(self, writer: QueueWriter, credit: QueueCredit, queue: str) -> None:
        self._writer = writer
        self._credit = credit
        self._queue = queue

    @property
    def is_open(self) -> bool:
        """Whether messages may be published to the queue now. False during the backoff after a refusal."""
        return self._writer.is_open

    @property
    def room(self) -> int:
        """How many emails may be published to the queue now. Raises BrokerUnavailable."""
        return self._credit.emails if self._writer.is_open else 0

    @property
    def wait_seconds(self) -> float:
        return max(self._writer.wait_seconds, self._credit.wait_seconds)

    def take(self, emails: int) -> None:
        self._credit.take(emails)

    async def publish(self, due: Sequence[DuePointer]) -> list[bool]:
        """Publishes emails. Returns for each whether RabbitMQ confirmed its message. Call `take` first."""
        pointers = [Pointer(row.email_id, row.message_key, row.correlation_id, row.traceparent) for row in due]
        messages, message_of = Outgoing.of_pointers(self._queue, pointers, self._credit.per_message(len(due)))
        self._credit.note_messages(len(messages), len(due))
        answers = await self._writer.publish(messages)
        confirmed = [answers[index] for index in message_of]
        get_log().debug("relay.published", count=self._writer.count(confirmed))
        return confirmed

    async def counted(self) -> None:
        await self._credit.counted()

    async def close(self) -> None:
        await self._credit.close()
