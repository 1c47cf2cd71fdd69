"""Publishes due rows of the whole database. A row stays due until RabbitMQ has confirmed its message."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.domain.retry import Backoff
from dispatcher.domain.values import dataclass
from dispatcher.errors import BrokerUnavailable, StatementRefused, StoreUnavailable
from dispatcher.host.clock import seconds_to_tick
from dispatcher.host.process_table import ProcessSlot
from dispatcher.host.services import Periodic, Service
from dispatcher.relay.dead_letters import DeadLetterPublisher
from dispatcher.relay.domain_waits import DomainWaits
from dispatcher.relay.leadership import IDLE_SECONDS, Leadership
from dispatcher.relay.notifications import PACE_SECONDS, POLL_SECONDS, QUIET_SECONDS, Notifications
from dispatcher.relay.pointers import BATCH, MARK_AFTER_SECONDS, PointerPublisher
from dispatcher.relay.queues import LaneQueue, QueueWriter
from dispatcher.relay.shares import Shares
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession, connect_async
from dispatcher.store.controls import READ_SECONDS
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry.log import get_log

STANDBY_SECONDS: Final = 1.0
IDLE_FACTOR: Final = 4
"""A relay that has nothing to do polls only once per second. Only dead letters and emails that become due without a
notification wait for the poll."""
IDLE_SHARE: Final = 1 / 10
"""The largest share of time that an idle relay spends on `Outbox.find_next_due`. While an old transaction is open, this
statement may be slow, because PostgreSQL reads the index entries of all rows that were due since. The relay then works
as if rows were due."""


@dataclass(frozen=True, slots=True)
class LeaderServices:
    """The services of a leading relay, in the order in which they run. `by_due_rows` have work only if
    `Outbox.find_next_due` says so."""

    by_time: Sequence[Service] = ()
    by_due_rows: Sequence[Service] = ()


class PublishLoop:
    """Publishes due rows while this relay leads. Otherwise, waits as a standby."""

    def __init__(
        self,
        settings: Settings,
        publisher: Publisher,
        services_of: Callable[[Outbox], LeaderServices],
        process_slot: ProcessSlot,
        *,
        poll_seconds: float = POLL_SECONDS,
        mark_after_seconds: float = MARK_AFTER_SECONDS,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """`services_of` creates the services for each term as the leader; they use the leader's session, and run before
        the first round and between rounds."""
        self._settings = settings
        self._publisher = publisher
        self._services_of = services_of
        self._process_slot = process_slot
        self._notifications_of = partial(Notifications, poll_seconds=poll_seconds, quiet_seconds=quiet_seconds)
        self._log = get_log()
        self._outage = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._broker_outage = Backoff(base_seconds=0.1, cap_seconds=2.0)
        shared = (publisher, process_slot, self._broker_outage)
        self._queues = {lane: LaneQueue(settings, *shared, lane) for lane in settings.lanes}
        self._dlq = QueueWriter(*shared, settings.dlq, kind="dlq")
        self._shares = Shares(self._queues)
        self._pointers = PointerPublisher(self._shares, mark_after_seconds=mark_after_seconds)
        self._dead_letters = DeadLetterPublisher(self._dlq, settings.dlq)
        self._is_stopping = False
        self._is_notified = False
        self._is_idle = False  # whether the last round found nothing to do, and waits for nothing
        self._look_at = 0.0

    def stop(self) -> None:
        """Makes `run` return as soon as no row is due, or the queues have no room for more messages."""
        self._is_stopping = True

    async def run(self) -> None:
        """Publishes while this relay leads, and otherwise waits as a standby, until `stop` is called. Reconnects after
        outages."""
        try:
            while not self._is_stopping:
                try:
                    async with await connect_async(
                        self._settings.database_url,
                        name="dispatcher relay",
                        lock_seconds=BATCH_LOCK_SECONDS,
                        idle_seconds=IDLE_SECONDS,
                        keeps_plans=True,
                    ) as session:
                        await self._lead(session)
                except StoreUnavailable as error:
                    seconds = self._outage.next_wait(random.random)
                    self._log.warning("store.connection_lost", reason=str(error), retry_in_seconds=round(seconds, 2))
                    await asyncio.sleep(seconds)
        finally:
            await self._pointers.close()
            for queue in self._queues.values():
                await queue.close()

    async def _lead(self, session: AsyncSession) -> None:
        """Waits until this relay leads; then publishes until stopped, or until it must give up the lead."""
        outbox = Outbox(session)
        self._process_slot.confirm.end()
        leadership = Leadership(session, self._publisher)
        try:
            while not await leadership.acquire():
                if self._is_stopping:
                    return
                await asyncio.sleep(STANDBY_SECONDS)
            await outbox.listen()
            await outbox.set_polling(is_on=False)  # whatever the leader before has set
            notifications = self._notifications_of(outbox)
            self._outage.reset()
            self._is_notified = self._is_idle = False  # so that the services run before the first batch
            self._log.info("relay.leading")
            domain_waits = DomainWaits(outbox)
            reader = _ControlsReader(outbox, self._shares, domain_waits)
            own_services: tuple[Service, ...] = reader, domain_waits, notifications
            others = self._services_of(outbox)
            by_time = [Periodic(service) for service in (*own_services, *others.by_time)]
            by_due_rows = [Periodic(service) for service in others.by_due_rows]
            publish_round = partial(self._publish_round, outbox, by_time, by_due_rows, notifications)
            while not self._is_stopping:
                await publish_round()
                if await leadership.must_release():
                    self._log.warning("relay.handed_over")
                    await self._pointers.mark_all(outbox)
                    return
            # Workers that exit may have released emails since the last round. Publish as many emails as the queues have
            # room for; the next leader publishes the rest. After RabbitMQ has counted the messages once more, the
            # queues may have room again, so repeat this once.
            for _ in range(2):
                while await publish_round():
                    pass
                for queue in self._queues.values():
                    await queue.counted()
            await self._pointers.mark_all(outbox)
        finally:
            await leadership.close()

    async def _publish_round(
        self,
        outbox: Outbox,
        by_time: Sequence[Periodic],
        by_due_rows: Sequence[Periodic],
        notifications: Notifications,
    ) -> bool:
        """Runs due services, and publishes a batch. Waits if no row was due. Returns whether rows were due.

        After a notification of a new email, the next round only publishes, so that the email does not wait for the
        services. After a round without work, one statement decides whether the next does more than that.
        """
        runs_services, self._is_notified = not self._is_notified, False
        was_idle, self._is_idle = self._is_idle and not self._is_stopping, False
        try:
            if runs_services:
                notified = notifications.count
                idle_seconds = await self._find_idle_seconds(outbox) if was_idle else 0.0
                await _run_due(by_time)
                if idle_seconds > 0 and notifications.are_on and notifications.count == notified:
                    self._is_idle = True
                    poll_seconds = seconds_to_tick(IDLE_FACTOR * notifications.wait_seconds)
                    waits = [poll_seconds, *(service.wait_seconds for service in by_time)]
                    self._is_notified = await notifications.wait(min(idle_seconds, *waits))
                    return False
                await _run_due(by_due_rows)
            found = await self._pointers.publish_due(outbox, is_last=self._is_stopping)
            if self._is_stopping:
                await self._pointers.wait_confirmed()
            dead_lettered = await self._dead_letters.publish_due(outbox, is_last=self._is_stopping)
        except BrokerUnavailable as error:
            seconds = self._broker_outage.next_wait(random.random)
            self._log.warning("broker.connection_lost", reason=error.message, retry_in_seconds=round(seconds, 2))
            await asyncio.sleep(seconds)
            return False
        notifications.note_round(found)
        if self._is_stopping or dead_lettered or found >= BATCH:
            return bool(found) or dead_lettered
        if found:
            await asyncio.sleep(PACE_SECONDS)
            if not notifications.are_on or self._pointers.has_backlog:
                return True
            # Emails that were committed in the meantime have sent notifications, so the wait below returns at once.
        is_waiting = self._pointers.has_unconfirmed or self._publisher.has_unanswered
        if not is_waiting and self._dlq.is_open and all(queue.is_open for queue in self._queues.values()):
            # No message waits for its confirm, and no queue is in the backoff after a refusal. So the relay no longer
            # waits for RabbitMQ.
            self._process_slot.confirm.end()
            # If rows are due that may not be published now, for example of a paused tenant, the relay is not idle.
            self._is_idle = notifications.are_on and not was_idle and self._pointers.wait_seconds == math.inf
        waits = [
            notifications.wait_seconds,
            self._pointers.wait_seconds,
            *(service.wait_seconds for service in (*by_time, *by_due_rows)),
        ]
        self._is_notified = await notifications.wait(min(waits)) and runs_services
        return False

    async def _find_idle_seconds(self, outbox: Outbox) -> float:
        """For how long the relay has nothing to do; 0 if this is unknown, or there is work now."""
        began_at = time.monotonic()
        if began_at < self._look_at:
            return 0.0
        try:
            seconds = await outbox.find_next_due()
        except StatementRefused:
            return 0.0  # PostgreSQL cannot read a row; the statement that needs the row reports this
        ended_at = time.monotonic()
        self._look_at = ended_at + (ended_at - began_at) / IDLE_SHARE
        return seconds


async def _run_due(services: Sequence[Periodic]) -> None:
    for service in services:
        await service.run_if_due()


@dataclass(slots=True, eq=False)
class _ControlsReader:
    """Applies what operators set: pauses, the tenants' weights and ceilings, and the ceilings of recipient domains."""

    outbox: Outbox
    shares: Shares
    domain_waits: DomainWaits
    interval_seconds = READ_SECONDS

    async def run_once(self) -> None:
        controls = await self.outbox.read_controls()
        self.shares.set_controls(controls)
        self.domain_waits.set_limits(controls.domains)
