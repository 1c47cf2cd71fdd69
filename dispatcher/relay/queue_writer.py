"""The relay's way to one queue. It closes for a while, and longer each time, when RabbitMQ takes no message there.

Each queue has a way of its own, because a DLQ that is missing must not delay an email.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.publisher import Answers, Publisher
from dispatcher.domain.backoff import Backoff
from dispatcher.host.roster import Seat
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log


class QueueWriter:
    """Publishes to one queue, and logs what RabbitMQ does not take."""

    def __init__(self, publisher: Publisher, seat: Seat, outage: Backoff, queue: str, *, kind: str) -> None:
        """
        Args:
            seat: Where the relay reports since when it waits for RabbitMQ's confirms.
            outage: The waits while RabbitMQ is away, which all writers share.
            kind: The queue's name in the metrics.
        """
        self._publisher = publisher
        self._seat = seat
        self._outage = outage
        self._queue = queue
        self._kind = kind
        self._backoff = Backoff(base_seconds=0.2, cap_seconds=5.0)
        self._closed_at = 0.0
        self._opens_at = 0.0
        self._log = get_log()

    @property
    def is_open(self) -> bool:
        """Whether it is time to publish to this queue."""
        return time.monotonic() >= self._opens_at

    async def publish(self, messages: Sequence[Outgoing]) -> Answers:
        """Publishes; returns which messages were confirmed.

        Raises:
            BrokerUnavailable: none was.
        """
        self._seat.confirm.begin()
        written_at = time.monotonic()
        answers = await self._publisher.publish(messages)
        if any(answers):
            self._seat.confirm.end()
            self._seat.served()
        if all(answers):
            self._backoff.worked()
        elif self._closed_at < written_at:  # RabbitMQ refuses many batches at once: that is one refusal
            self._close(answers)
        if self._outage.worked():
            self._log.info("broker.connected")
        return answers

    def count(self, confirmed: Sequence[bool]) -> int:
        """Counts emails whose messages were confirmed or not; returns how many were."""
        published = confirmed.count(True)
        metrics.PUBLISHED_EMAILS.add(published, self._kind)
        metrics.UNROUTABLE_EMAILS.add(len(confirmed) - published, self._kind)
        return published

    def _close(self, answers: Answers) -> None:
        seconds = self._backoff.next_wait(random.random)
        self._closed_at = time.monotonic()
        self._opens_at = self._closed_at + seconds
        fields = {"queue": self._queue, "retry_in_seconds": round(seconds, 2)}
        if answers.returned:
            self._log.error("relay.unroutable", count=answers.returned, **fields)
        if (unconfirmed := answers.count(False) - answers.returned) > 0:
            self._log.error("relay.unconfirmed", count=unconfirmed, **fields)
