"""Publishes the messages of new emails immediately after their commit, without the relay.

This saves time, but nothing depends on it. If RabbitMQ is unreachable or the process exits first, the email stays due,
and the relay publishes its message five seconds after the insert. One second after RabbitMQ has confirmed messages, one
statement clears the due marks of the emails that no worker has leased yet.
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
"""The time after which the relay publishes an email that this process has not published. It is longer than a successful
publish takes, and an acceptable delay if the publish failed."""
MARK_AFTER_SECONDS: Final = 1.0
MAX_QUEUED: Final = 20_000
"""The most emails in the queue, so that a slow broker does not fill the memory. The relay publishes further emails."""


class ImmediatePublisher:
    """Publishes emails in batches, one batch at a time.

    When RabbitMQ has confirmed an email's message, clears the email's due mark. The relay then does not publish it.
    """

    interval_seconds = 0.25
    """How often due marks are cleared."""

    def __init__(self, publisher: Publisher, store: DraftStore, queue: str, *, bundle: int = 1) -> None:
        """
        Args:
            queue: The routing key.
            bundle: The most emails per message.
        """
        self._bundle = bundle
        self._publisher = publisher
        self._store = store
        self._queue = queue
        self._batches: BatchQueue[tuple[Pointer, datetime]] = BatchQueue()
        self._queued = 0
        self._confirmed = ConfirmedMessages()
        self._paused_until = 0.0
        self._outage = Backoff(base_seconds=0.2, cap_seconds=5.0)
        self._log = get_log()

    def add(self, drafts: Sequence[Draft], due_at: Mapping[UUID, datetime]) -> None:
        """Queues committed emails. Drops them while RabbitMQ is unreachable or the queue is full.

        Args:
            due_at: The `publish_due_at` of each email.
        """
        if time.monotonic() < self._paused_until or self._queued + len(drafts) > MAX_QUEUED:
            return
        self._queued += len(drafts)
        for draft in drafts:  # keeps only the pointer: the content may be large
            self._batches.add((_pointer(draft), due_at[draft.email_id]))

    async def run(self) -> None:
        """Publishes until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(self._batches.run, self._publish))
            group.create_task(raise_on_stray_cancel(Periodic(self).run))

    async def finish(self) -> None:
        """Returns when the queue is empty and the due marks of confirmed emails are cleared."""
        await self._batches.finish()
        await self._mark(age_seconds=0.0)

    async def _publish(self, batch: list[tuple[Pointer, datetime]]) -> None:
        self._queued -= len(batch)
        if time.monotonic() < self._paused_until:
            return
        try:
            messages, message_of = Outgoing.of_pointers(self._queue, [pointer for pointer, _ in batch], self._bundle)
            confirmed = await self._publisher.publish(messages)
        except BrokerUnavailable as error:
            self._pause(error.message)
            return
        published = [confirmed[index] for index in message_of]
        if not all(published):
            # RabbitMQ returned or rejected a message. The relay logs that the queue is misconfigured.
            self._pause("RabbitMQ did not route every message.")
        elif self._outage.reset():
            self._log.info("broker.connected")
        due = {pointer.email_id: due_at for (pointer, due_at), routed in zip(batch, published, strict=True) if routed}
        metrics.UNROUTABLE_EMAILS.add(len(batch) - len(due), "send")
        if due:
            metrics.PUBLISHED_EMAILS.add(len(due), "send")
            self._confirmed.add(due, time.monotonic())

    def _pause(self, reason: str) -> None:
        seconds = self._outage.next_wait(random.random)
        self._paused_until = time.monotonic() + seconds
        self._log.warning("broker.connection_lost", reason=reason, retry_in_seconds=round(seconds, 2))

    async def run_once(self) -> None:
        """Clears the due marks of emails that were confirmed at least a second ago."""
        await self._mark(age_seconds=MARK_AFTER_SECONDS)

    async def _mark(self, *, age_seconds: float) -> None:
        now = time.monotonic()
        due = self._confirmed.to_mark(now - age_seconds, len(self._confirmed))
        if not due:
            return
        self._confirmed.discard(due, now)
        try:
            await self._store.mark_published(due)
        except DispatcherError as error:
            # The relay publishes these emails again; their workers find that they are already leased or finished.
            self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=0)


def _pointer(draft: Draft) -> Pointer:
    email = draft.email
    return Pointer(draft.email_id, email.message_key, email.correlation_id, draft.traceparent)
