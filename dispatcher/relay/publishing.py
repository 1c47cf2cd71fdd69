"""The database's one publisher: rows that are due become messages, and stay due until a broker confirmed them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.domain.backoff import Backoff
from dispatcher.errors import BrokerUnavailable, StoreUnavailable
from dispatcher.host.roster import Seat
from dispatcher.host.services import Periodic, Service
from dispatcher.relay.dead_letters import DeadLetters
from dispatcher.relay.leadership import Leadership
from dispatcher.relay.pointers import BATCH, MARK_AFTER_SECONDS, Pointers
from dispatcher.relay.queue_writer import QueueWriter
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession, connect_async
from dispatcher.store.outbox import DuePointer, Outbox
from dispatcher.telemetry.log import get_log

POLL_SECONDS: Final = 0.25
"""The floor under LISTEN/NOTIFY: what nobody announced is found this late."""
PACE_SECONDS: Final = 0.005
"""After a look that found something, until the next: what commits meanwhile shares a look, a write, and a lease."""
STANDBY_SECONDS: Final = 1.0
NOTICES_SECONDS: Final = 10.0
"""While every look finds something, nobody waits for notices, and they would heap up."""


class Publishing:
    """Publishes while it leads; else stands by to lead."""

    def __init__(
        self,
        settings: Settings,
        publisher: Publisher,
        services_of: Callable[[Outbox], Sequence[Service]],
        seat: Seat,
        *,
        poll_seconds: float = POLL_SECONDS,
        mark_after_seconds: float = MARK_AFTER_SECONDS,
    ) -> None:
        """
        Args:
            services_of: Makes the leader's services, whenever it takes the lead. They run between its looks, in its
                session, and before its first look.
            seat: Where it reports since when it waits for RabbitMQ's confirms.
            poll_seconds: How long it sleeps where nobody wakes it.
            mark_after_seconds: See `Pointers`.
        """
        self._settings = settings
        self._publisher = publisher
        self._services_of = services_of
        self._seat = seat
        self._poll_seconds = poll_seconds
        self._log = get_log()
        self._outage = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._broker_outage = Backoff(base_seconds=0.1, cap_seconds=2.0)
        self._send_queue = QueueWriter(publisher, seat, self._broker_outage, settings.queue, kind="send")
        self._dlq = QueueWriter(publisher, seat, self._broker_outage, settings.dlq, kind="dlq")
        self._pointers = Pointers(self._publish_pointers, mark_after_seconds=mark_after_seconds)
        self._dead_letters = DeadLetters(self._dlq, settings.dlq)
        self._stopping = False

    def stop(self) -> None:
        """Ends `run` once nothing is due any more."""
        self._stopping = True

    async def run(self) -> None:
        """Leads or stands by until stopped, however often PostgreSQL goes away."""
        try:
            while not self._stopping:
                await self._lead_in_a_session()
        finally:
            await self._pointers.close()

    async def _lead_in_a_session(self) -> None:
        try:
            async with await connect_async(
                self._settings.database_url,
                name="dispatcher relay",
                lock_seconds=BATCH_LOCK_SECONDS,
                keeps_plans=True,
            ) as session:
                await self._lead(session)
        except StoreUnavailable as error:
            seconds = self._outage.next_wait(random.random)
            self._log.warning("store.connection_lost", reason=str(error), retry_in_seconds=round(seconds, 2))
            await asyncio.sleep(seconds)

    async def _lead(self, session: AsyncSession) -> None:
        """Stands by, then publishes until we are stopped, or another relay can and we cannot.

        The lead ends with the session.
        """
        outbox = Outbox(session)
        self._seat.confirm.end()
        leadership = Leadership(session, self._publisher)
        try:
            while not await leadership.gain():
                if self._stopping:
                    return
                await asyncio.sleep(STANDBY_SECONDS)
            await outbox.listen()
            self._outage.worked()
            self._log.info("relay.leading")
            services = [Periodic(service) for service in (*self._services_of(outbox), _Notices(outbox))]
            while not self._stopping:
                await self._publish_round(outbox, services)
                if await leadership.must_be_given_up():
                    self._log.warning("relay.handed_over")
                    await self._pointers.mark_all(outbox)
                    return
            # What became due since that look: the workers' last results.
            while await self._publish_round(outbox, services):
                pass
            await self._pointers.mark_all(outbox)
        finally:
            await leadership.close()

    async def _publish_round(self, outbox: Outbox, services: Sequence[Periodic]) -> bool:
        """One look at everything that is due, and a wait where that was little; returns whether something was."""
        try:
            for service in services:
                await service.run_if_due()
            found = 0
            if self._send_queue.is_open:
                found = await self._pointers.look(outbox, is_last=self._stopping)
                if self._stopping:
                    await self._pointers.arrived()
            dead_lettered = await self._dead_letters.look(outbox, is_last=self._stopping)
        except BrokerUnavailable as error:
            seconds = self._broker_outage.next_wait(random.random)
            self._log.warning("broker.connection_lost", reason=error.message, retry_in_seconds=round(seconds, 2))
            await asyncio.sleep(seconds)
            return False
        if self._stopping or dead_lettered or found >= BATCH:
            return bool(found) or dead_lettered
        if found:
            await asyncio.sleep(PACE_SECONDS)
            return True
        if not self._pointers.are_on_the_way and self._send_queue.is_open and self._dlq.is_open:
            self._seat.confirm.end()  # nothing is due
        await outbox.wait(self._poll_seconds)
        return False

    async def _publish_pointers(self, due: list[DuePointer]) -> list[bool]:
        pointers = [Pointer(row.email_id, row.message_key, row.correlation_id, row.traceparent) for row in due]
        messages, message_of = Outgoing.of_pointers(self._settings.queue, pointers, self._settings.bundle_emails)
        answers = await self._send_queue.publish(messages)
        confirmed = [answers[index] for index in message_of]
        self._log.debug("relay.published", count=self._send_queue.count(confirmed))
        return confirmed


class _Notices:
    """Takes the notices of enqueues that no look has waited for."""

    interval_seconds = NOTICES_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> None:
        await self._outbox.wait(0.0)
