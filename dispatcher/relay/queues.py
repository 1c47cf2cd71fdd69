"""Publishes to one queue. While RabbitMQ refuses the queue's messages, waits longer and longer before the next try.

Each queue has a writer of its own, so that a missing DLQ does not delay emails. If RabbitMQ returns messages because
the queue has lost its binding, the writer binds the queue again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

from dispatcher.broker.credit import QueueCredit
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import Publisher, PublishResults
from dispatcher.config import Settings
from dispatcher.domain.retry import Backoff
from dispatcher.errors import BrokerUnavailable
from dispatcher.host.process_table import ProcessSlot
from dispatcher.store.outbox import DuePointer
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log


class QueueWriter:
    """Publishes to one queue, and logs messages that RabbitMQ refuses."""

    def __init__(
        self, publisher: Publisher, process_slot: ProcessSlot, outage: Backoff, queue: str, *, kind: str
    ) -> None:
        """`outage` is the backoff that all writers share. `kind` is the queue's label in the metrics: `send` or
        `dlq`."""
        self._publisher = publisher
        self._process_slot = process_slot
        self._outage = outage
        self._queue = queue
        self._kind = kind
        self._backoff = Backoff(base_seconds=0.2, cap_seconds=5.0)
        self._closed_at = 0.0
        self._opens_at = 0.0
        self._log = get_log()

    @property
    def is_open(self) -> bool:
        """Whether messages may be published to the queue now. False for a while after RabbitMQ refused a message."""
        return time.monotonic() >= self._opens_at

    async def write(self, messages: Sequence[Outgoing]) -> PublishResults:
        """Publishes messages. Returns for each whether RabbitMQ confirmed it. Raises BrokerUnavailable if it confirmed
        none."""
        self._process_slot.confirm.begin()
        written_at = time.monotonic()
        answers = await self._publisher.publish(messages)
        if any(answers):
            self._process_slot.confirm.end()
            self._process_slot.note_served()
        if all(answers):
            self._backoff.reset()
        elif self._closed_at < written_at:
            # The batch was published after the last refusal arrived. A refusal of an earlier batch does not lengthen
            # the backoff.
            await self._close(answers)
        if self._outage.reset():
            self._log.info("broker.connected")
        return answers

    def count(self, confirmed: Sequence[bool]) -> int:
        """Counts confirmed and refused emails in the metrics. Returns the number of confirmed emails."""
        published = confirmed.count(True)
        metrics.PUBLISHED_EMAILS.add(published, self._kind)
        metrics.UNROUTABLE_EMAILS.add(len(confirmed) - published, self._kind)
        return published

    async def _close(self, answers: PublishResults) -> None:
        seconds = self._backoff.next_wait(random.random)
        self._closed_at = time.monotonic()
        self._opens_at = self._closed_at + seconds
        fields = {"queue": self._queue, "retry_in_seconds": round(seconds, 2)}
        if answers.returned:
            reason = "The queue was not bound to the exchange. The relay has bound it now."
            try:
                await self._publisher.bind(self._queue)
            except BrokerUnavailable as fault:
                reason = str(fault)
            self._log.error("relay.unroutable", count=answers.returned, reason=reason, **fields)
        if (unconfirmed := answers.count(False) - answers.returned) > 0:
            self._log.error("relay.unconfirmed", count=unconfirmed, **fields)


class LaneQueue(QueueWriter):
    """Publishes emails to the send queue of a lane, and limits how many emails are on the queue."""

    def __init__(
        self, settings: Settings, publisher: Publisher, process_slot: ProcessSlot, outage: Backoff, lane: str
    ) -> None:
        queue = settings.queue_of(lane)
        super().__init__(publisher, process_slot, outage, queue, kind="send")
        self._credit = QueueCredit(
            partial(publisher.find, queue), most_per_message=settings.bundle_emails, prefetch=settings.prefetch
        )
        self.take = self._credit.take
        self.counted = self._credit.counted
        self.close = self._credit.close

    @property
    def room(self) -> int:
        """How many emails may be published to the queue now. Raises BrokerUnavailable."""
        return self._credit.emails if self.is_open else 0

    @property
    def wait_seconds(self) -> float:
        """How long to wait until more emails may be published."""
        return max(self._opens_at - time.monotonic(), self._credit.wait_seconds)

    async def publish(self, due: Sequence[DuePointer]) -> list[bool]:
        """Publishes emails. Returns for each whether RabbitMQ confirmed its message. Call `take` first."""
        pointers = [Pointer(row.email_id, row.message_key, row.correlation_id, row.traceparent) for row in due]
        messages, message_of = Outgoing.of_pointers(self._queue, pointers, self._credit.per_message(len(due)))
        self._credit.note_messages(len(messages), len(due))
        answers = await self.write(messages)
        confirmed = [answers[index] for index in message_of]
        self._log.debug("relay.published", count=self.count(confirmed))
        return confirmed
