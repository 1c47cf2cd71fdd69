"""Announcing: the messages of what was just inserted, published at once and confirmed.

Nothing depends on it. An email that is not announced, because RabbitMQ is away or this process ended, stays due, and
the relay publishes it when it is due. A second after RabbitMQ has confirmed the messages, one statement marks the
emails that no worker has leased by then.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.broker.confirmed import ConfirmedMessages
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import Publisher
from dispatcher.domain.backoff import Backoff
from dispatcher.errors import BrokerUnavailable, DispatcherError
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.host.lifecycle import raise_on_stray_cancel
from dispatcher.host.services import Periodic
from dispatcher.store.drafts import DraftStore
from dispatcher.store.enqueueing import Draft
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

RELAY_AFTER_SECONDS: Final = 5.0
"""When the relay publishes what was not announced. Later than any announcement that works, and a delay that is bearable
where one did not."""
MARK_AFTER_SECONDS: Final = 1.0
MOST_WAITING: Final = 20_000
"""Messages that wait for RabbitMQ; more are left to the relay, so that a slow broker does not fill the memory."""


class Announcing:
    """Publishes what it is given, one batch after the other, and marks what was confirmed."""

    interval_seconds = 0.25
    """Between two looks for what to mark."""

    def __init__(self, publisher: Publisher, store: DraftStore, queue: str, *, bundle: int = 1) -> None:
        """
        Args:
            bundle: Most emails that a message points to.
        """
        self._bundle = bundle
        self._publisher = publisher
        self._store = store
        self._queue = queue
        self._batches: BatchQueue[tuple[Pointer, datetime]] = BatchQueue()
        self._waiting = 0
        self._confirmed = ConfirmedMessages()
        self._opens_at = 0.0
        self._outage = Backoff(base_seconds=0.2, cap_seconds=5.0)
        self._log = get_log()

    def add(self, drafts: Sequence[Draft], due_at: Mapping[UUID, datetime]) -> None:
        """Announces emails that are committed as due at these instants; keeps none while RabbitMQ is away."""
        if time.monotonic() < self._opens_at or self._waiting + len(drafts) > MOST_WAITING:
            return
        self._waiting += len(drafts)
        for draft in drafts:  # keep the pointer only: the content may be large
            self._batches.add((_pointer(draft), due_at[draft.email_id]))

    async def run(self) -> None:
        """Announces until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(self._batches.run, self._publish))
            group.create_task(raise_on_stray_cancel(Periodic(self).run))

    async def finish(self) -> None:
        """Returns once everything was published or given up, and marked."""
        await self._batches.finish()
        await self._mark(age_seconds=0.0)

    async def _publish(self, batch: list[tuple[Pointer, datetime]]) -> None:
        self._waiting -= len(batch)
        if time.monotonic() < self._opens_at:
            return
        try:
            messages, message_of = Outgoing.of_pointers(self._queue, [pointer for pointer, _ in batch], self._bundle)
            answers = await self._publisher.publish(messages)
        except BrokerUnavailable as error:
            self._pause(error.message)
            return
        published = [answers[index] for index in message_of]
        if not all(published):
            # It came back, or was refused: the relay tells the operator, who has a queue to mend.
            self._pause("RabbitMQ did not route every message.")
        elif self._outage.worked():
            self._log.info("broker.connected")
        due = {pointer.email_id: due_at for (pointer, due_at), is_out in zip(batch, published, strict=True) if is_out}
        metrics.UNROUTABLE_EMAILS.add(len(batch) - len(due), "send")
        if due:
            metrics.PUBLISHED_EMAILS.add(len(due), "send")
            self._confirmed.add(due, time.monotonic())

    def _pause(self, reason: str) -> None:
        seconds = self._outage.next_wait(random.random)
        self._opens_at = time.monotonic() + seconds
        self._log.warning("broker.connection_lost", reason=reason, retry_in_seconds=round(seconds, 2))

    async def run_once(self) -> None:
        """Marks what was confirmed a while ago."""
        await self._mark(age_seconds=MARK_AFTER_SECONDS)

    async def _mark(self, *, age_seconds: float) -> None:
        now = time.monotonic()
        due = self._confirmed.to_mark(now - age_seconds, len(self._confirmed))
        if not due:
            return
        self._confirmed.tried(due, now)
        try:
            await self._store.mark_announced(due)
        except DispatcherError as error:
            # Left as they are, they are published once more, and their workers see that it was done.
            self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=0)


def _pointer(draft: Draft) -> Pointer:
    email = draft.email
    return Pointer(draft.email_id, email.message_key, email.correlation_id, draft.traceparent)
