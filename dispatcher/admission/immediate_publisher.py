"""Publishes the messages of new emails immediately after their commit, without the relay.

This saves time, but no email depends on this module. The publisher publishes an email only if the email's lane is not
paused, the lane's queue has few messages, and the tenant has neither a pause nor a ceiling. All other emails are due
immediately, and the relay publishes them, so that lanes and tenants take turns. If RabbitMQ is unreachable, or if the
process exits before it publishes an email, the email stays due, and the relay publishes it five seconds after the
insert. One second after RabbitMQ has confirmed messages, one statement clears the due marks of the emails that no
worker has leased yet.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final, TypeAlias

from dispatcher.broker.confirmed import ConfirmedMessages
from dispatcher.broker.credit import QueueCredit
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import Publisher
from dispatcher.domain.controls import Controls
from dispatcher.domain.retry import Backoff
from dispatcher.errors import BrokerUnavailable, DispatcherError
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.host.lifecycle import raise_on_stray_cancel
from dispatcher.host.services import Periodic
from dispatcher.store.connections import Pool
from dispatcher.store.controls import READ_SECONDS, LatestControls
from dispatcher.store.drafts import DraftStore, Insertion
from dispatcher.store.enqueueing import Draft
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

RELAY_AFTER_SECONDS: Final = 5.0
"""The time after which the relay publishes an email that this process has not published. A successful publish takes
less time. After a failed publish, the delay is acceptable."""
MARK_AFTER_SECONDS: Final = 1.0
MAX_QUEUED: Final = 20_000
"""The most emails in the queue, so that a slow broker does not fill the memory. The relay publishes further emails."""
FIRST_COUNT_SECONDS: Final = 1.0
"""How long the API waits, when it starts, for RabbitMQ's counts of the messages on the queues. Without these counts,
the relay publishes all emails."""
_Queued: TypeAlias = "tuple[str, Pointer, datetime]"
"""A committed email: its lane, its pointer, and when it is due."""


class ControlsReader:
    """Reads the controls (what operators set for lanes and tenants, and all pauses) once per second."""

    interval_seconds = READ_SECONDS

    def __init__(self, pool: Pool) -> None:
        self._latest = LatestControls(pool)
        self.now = Controls()

    async def run_once(self) -> None:
        """Reads the controls. While PostgreSQL is unreachable, the last controls stay in force."""
        try:
            self.now = await self._latest.read()
        except DispatcherError as error:
            get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=READ_SECONDS)


class ImmediatePublisher:
    """Publishes the messages of new emails in batches, one batch at a time.

    When RabbitMQ has confirmed an email's message, the publisher clears the email's due mark, so that the relay does
    not publish the email.
    """

    interval_seconds = 0.25
    """How often due marks are cleared."""

    def __init__(
        self,
        publisher: Publisher,
        store: DraftStore,
        queues: Mapping[str, str],
        pool: Pool,
        *,
        bundle: int,
        prefetch: int,
    ) -> None:
        """`queues`: each lane's send queue, whose name is also the routing key. `bundle`: the most emails per message.
        `prefetch`: a worker's prefetch window."""
        self._publisher = publisher
        self._store = store
        self._queues = queues
        self._credits = {
            lane: QueueCredit(partial(publisher.find, name), most_per_message=bundle, prefetch=prefetch)
            for lane, name in queues.items()
        }
        self._controls = ControlsReader(pool)
        self._batches: BatchQueue[_Queued] = BatchQueue()
        self._queued = 0
        self._confirmed = ConfirmedMessages()
        self._paused_until = dict.fromkeys(queues, 0.0)
        self._outages = {lane: Backoff(base_seconds=0.2, cap_seconds=5.0) for lane in queues}
        self._log = get_log()

    def direct_lanes(self) -> list[str]:
        """The lanes whose new emails this publisher publishes; the relay publishes those of the other lanes.

        Leaves out lanes that are paused, that have many messages on their queues, or for which publishing failed
        recently.
        """
        now, controls = time.monotonic(), self._controls.now
        open_lanes = [lane for lane, until in self._paused_until.items() if now >= until]
        return [lane for lane in open_lanes if controls.pause_of_lane(lane) is None and self._has_credit(lane)]

    def relay_tenants(self, tenant_ids: Iterable[str]) -> list[str]:
        """Returns the tenants that are paused or have a ceiling. The relay publishes their emails."""
        controls = self._controls.now
        paused = controls.paused_tenants
        limits = controls.tenants
        return [
            tenant_id
            for tenant_id in set(tenant_ids)
            if tenant_id in paused or (tenant_id in limits and limits[tenant_id].per_second is not None)
        ]

    def add(self, drafts: Sequence[Draft], insertion: Insertion) -> None:
        """Queues emails that were just committed, so that `run` publishes their messages.

        Leaves out the emails that the relay publishes (see the module). If too many emails are queued already, leaves
        all of them to the relay.
        """
        direct = insertion.direct_lane
        if self._queued + len(direct) > MAX_QUEUED:
            return
        self._queued += len(direct)
        # Queue only the pointer to each email, because the email's content may be large.
        for draft in drafts:
            due_at = insertion.due_at.get(draft.email_id)
            if due_at is not None and (lane := direct.get(draft.email_id)):
                self._credits[lane].take(1)
                email = draft.email
                pointer = Pointer(draft.email_id, email.message_key, email.correlation_id, draft.traceparent)
                self._batches.add((lane, pointer, due_at))

    async def begin(self) -> None:
        """Reads pauses and ceilings, and the depth of the queues. Call this before the first email is inserted."""
        await self._controls.run_once()
        self.direct_lanes()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_COUNT_SECONDS):
                await asyncio.gather(*(credit.counted() for credit in self._credits.values()))

    async def run(self) -> None:
        """Publishes the messages of queued emails, reads the controls and clears due marks, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(self._batches.run, self._publish))
            group.create_task(raise_on_stray_cancel(Periodic(self._controls).run))
            group.create_task(raise_on_stray_cancel(Periodic(self).run))

    async def finish(self) -> None:
        """Waits until `run` has published all queued emails, and clears the due marks of the published emails."""
        await self._batches.finish()
        for credit in self._credits.values():
            await credit.close()
        await self._mark(age_seconds=0.0)

    def _has_credit(self, lane: str) -> bool:
        try:
            return self._credits[lane].emails > 0
        except BrokerUnavailable:
            return False

    async def _publish(self, batch: list[_Queued]) -> None:
        self._queued -= len(batch)
        now = time.monotonic()
        batch = [queued for queued in batch if now >= self._paused_until[queued[0]]]
        messages: list[Outgoing] = []
        message_of: list[int] = []
        batch.sort(key=itemgetter(0))  # sorts by lane, and keeps the order within a lane
        for lane, queued in groupby(batch, key=itemgetter(0)):
            pointers = [pointer for _, pointer, _ in queued]
            credit = self._credits[lane]
            of_lane, indexes = Outgoing.of_pointers(self._queues[lane], pointers, credit.per_message(len(pointers)))
            credit.note_messages(len(of_lane), len(pointers))
            message_of += [len(messages) + index for index in indexes]
            messages += of_lane
        try:
            confirmed = await self._publisher.publish(messages)
        except BrokerUnavailable as error:
            self._pause(self._queues, error.message)
            return
        published = [confirmed[index] for index in message_of]
        refused = {lane for (lane, _, _), routed in zip(batch, published, strict=True) if not routed}
        # RabbitMQ returned or rejected at least one message of each of these lanes. Pause only these lanes.
        for lane in refused:
            self._pause([lane], f'RabbitMQ did not route every message to the queue "{self._queues[lane]}".')
        recovered = [lane for lane in {lane for lane, _, _ in batch} - refused if self._outages[lane].reset()]
        if recovered:
            self._log.info("broker.connected")
        due = {
            pointer.email_id: due_at for (_, pointer, due_at), routed in zip(batch, published, strict=True) if routed
        }
        metrics.UNROUTABLE_EMAILS.add(len(batch) - len(due), "send")
        if due:
            metrics.PUBLISHED_EMAILS.add(len(due), "send")
            self._confirmed.add(due, time.monotonic())

    def _pause(self, lanes: Iterable[str], reason: str) -> None:
        """After a failure, leaves the emails of these lanes to the relay for a random time.

        The longest possible time grows with each failure, up to a limit.
        """
        waits = {lane: self._outages[lane].next_wait(random.random) for lane in lanes}
        now = time.monotonic()
        self._paused_until |= {lane: now + seconds for lane, seconds in waits.items()}
        self._log.warning("broker.connection_lost", reason=reason, retry_in_seconds=round(min(waits.values()), 2))

    async def run_once(self) -> None:
        """Clears the due marks of emails whose messages RabbitMQ confirmed at least a second ago."""
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
            # The emails in `due` keep their due marks, so the relay publishes them again. This is harmless: workers
            # find that the emails are already leased or finished.
            self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=0)
