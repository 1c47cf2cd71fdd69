"""The database's one publisher: rows that are due become messages, and stay due until a broker confirmed them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from dispatcher.broker.dead_letter import DeadLetter
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import Answers, Publisher
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.domain.backoff import Backoff
from dispatcher.domain.rescue import host_grace_seconds, rescue_interval_seconds
from dispatcher.domain.status import Status
from dispatcher.errors import BrokerUnavailable, StoreUnavailable, TopologyError
from dispatcher.host.roster import Seat
from dispatcher.relay.leadership import Leadership
from dispatcher.relay.pointers import BATCH, MARK_AFTER_SECONDS, Pointers
from dispatcher.relay.unrenewed import Unrenewed
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession, connect_async
from dispatcher.store.outbox import DueDeadLetter, DuePointer, Outbox, Rescued
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

POLL_SECONDS: Final = 0.25
"""The floor under LISTEN/NOTIFY: what nobody announced is found this late, and dead letters, which nobody waits for."""
PACE_SECONDS: Final = 0.005
"""After a look that found something, until the next: what commits meanwhile shares a look, a write, and a lease."""
STANDBY_SECONDS: Final = 1.0
VANISHED_SECONDS: Final = 10.0
MOST_OVERTAKEN: Final = 100
"""At a look: whoever is overtaken for another reason must not fill the queue with second messages."""
TIMELINE_SECONDS: Final = 1.0
PARTITION_SECONDS: Final = 3600.0
NOTICES_SECONDS: Final = 10.0
"""While every look finds something, nobody waits for notices, and they would heap up."""


class Publishing:
    """Publishes while it leads; else stands by to lead."""

    def __init__(
        self,
        settings: Settings,
        publisher: Publisher,
        workers_here: Callable[[], Collection[str] | None],
        seat: Seat,
        *,
        poll_seconds: float = POLL_SECONDS,
        mark_after_seconds: float = MARK_AFTER_SECONDS,
    ) -> None:
        """
        Args:
            workers_here: Whose leases the settlement of this host looks after; None while it does not know.
            seat: Where it says since when it waits for RabbitMQ's confirms.
            poll_seconds: How long it sleeps where nobody wakes it.
            mark_after_seconds: See `Pointers`.
        """
        self._settings = settings
        self._poll_seconds = poll_seconds
        self._publisher = publisher
        self._workers_here = workers_here
        self._seat = seat
        self._log = get_log()
        self._outage = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._broker_outage = Backoff(base_seconds=0.1, cap_seconds=2.0)
        self._gates = {queue: _Gate() for queue in (settings.queue, settings.dlq)}
        self._pointers = Pointers(self._publish_pointers, mark_after_seconds=mark_after_seconds)
        self._dead_letters_at = 0.0
        self._rescue_at = 0.0
        self._timeline_at = 0.0
        self._unrenewed = Unrenewed(settings.lease_seconds)
        self._vanished_at = 0.0
        self._partitions_at = 0.0
        self._notices_at = 0.0
        self._stopping = False

    def stop(self) -> None:
        """Ends `run` once nothing is due any more."""
        self._stopping = True

    async def run(self) -> None:
        """Leads or stands by until stopped, however often PostgreSQL goes away."""
        try:
            await self._lead_surely()
        finally:
            await self._pointers.close()

    async def _lead_surely(self) -> None:
        while not self._stopping:
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
        outbox = Outbox(session)
        self._seat.confirm.end()
        leadership = Leadership(outbox, self._publisher)
        while not await leadership.gain():
            if self._stopping:
                return
            await asyncio.sleep(STANDBY_SECONDS)
        try:
            await self._lead_on(outbox, leadership)
        finally:
            await leadership.close()

    async def _lead_on(self, outbox: Outbox, leadership: Leadership) -> None:
        """Publishes until we are stopped, or another relay can and we cannot; the lock ends with the session."""
        await outbox.listen()
        # PostgreSQL may have been away for longer than leases last: their living owners come back first.
        self._unrenewed = Unrenewed(self._settings.lease_seconds)
        self._timeline_at = 0.0  # another server may answer, which lacks what the one before had committed
        self._outage.worked()
        self._log.info("relay.leading")
        while not self._stopping:
            await self._publish_round(outbox)
            if await leadership.must_be_given_up():
                self._log.warning("relay.handed_over")
                await self._pointers.mark_all(outbox)
                return
        # What became due since that look: the workers' last results.
        while await self._publish_round(outbox):
            pass
        await self._pointers.mark_all(outbox)

    async def _publish_round(self, outbox: Outbox) -> bool:
        """One look at everything that is due, and a wait where that was little; returns whether something was."""
        await self._look_after(outbox)
        try:
            found = await self._look_for_pointers(outbox)
            dead_lettered = await self._look_for_dead_letters(outbox)
            if not self._stopping:
                await self._find_vanished(outbox)
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
        if not self._pointers.are_on_the_way and all(gate.is_open for gate in self._gates.values()):
            self._seat.confirm.end()  # nothing is due
        await outbox.wait(self._poll_seconds)
        return False

    async def _look_after(self, outbox: Outbox) -> None:
        now = time.monotonic()
        if now >= self._timeline_at:
            self._timeline_at = now + TIMELINE_SECONDS
            await self._follow_timeline(outbox)
        if now >= self._rescue_at:
            self._rescue_at = now + rescue_interval_seconds(self._settings.lease_seconds)
            await self._rescue(outbox)
        if now >= self._notices_at:
            self._notices_at = now + NOTICES_SECONDS
            await outbox.wait(0.0)
        if now >= self._partitions_at:
            self._partitions_at = now + PARTITION_SECONDS
            if names := await outbox.make_partitions():
                self._log.info("partition.made", names=names)

    async def _rescue(self, outbox: Outbox) -> None:
        settings = self._settings
        workers_here = self._workers_here()
        if workers_here is None:
            return
        found = await outbox.find_expiring(workers_here, within_seconds=self._unrenewed.within_seconds)
        self._unrenewed.look(found)
        expired = [lease for lease in found if self._unrenewed.has_expired(lease)][:BATCH]
        rescued = await outbox.rescue_expired(
            settings.on_uncertain,
            settings.max_attempts,
            expired,
            grace_seconds=host_grace_seconds(settings.lease_seconds),
        )
        self._tell_rescued(rescued, "lease_expired")

    def _tell_rescued(self, rescued: list[Rescued], reason: str) -> None:
        for email in rescued:
            metrics.RESCUED.add(1, reason)
            metrics.HELD.add(email.status is Status.HELD, reason)
            self._log.warning(
                "email.rescued",
                email_id=str(email.email_id),
                correlation_id=email.correlation_id,
                status=email.status,
                attempt=email.attempt_count,
                reason=reason,
            )

    async def _follow_timeline(self, outbox: Outbox) -> None:
        if (promotion := await outbox.follow_timeline()) is None:
            return
        log = self._log.error if promotion.is_lossy else self._log.info
        log(
            "store.promoted",
            timeline=promotion.timeline,
            timeline_before=promotion.timeline_before,
            lossy=promotion.is_lossy,
            leases=promotion.lease_count,
            messages=promotion.message_count,
        )

    async def _find_vanished(self, outbox: Outbox) -> None:
        """Makes emails due again whose message RabbitMQ has lost: still pending, and the send queue is empty, or others
        that were published long after them are being sent.

        A message that a worker holds and has not leased looks the same. A second one is harmless, and there is never a
        heap of them: they fill the workers' windows, and from then on the queue is not empty. With bundles a window
        holds as many times more, so that a slow provider's workers may get them twice, and here they count as vanished.
        """
        now, age_seconds = time.monotonic(), self._settings.lease_seconds / 2
        if now < self._vanished_at:
            return
        self._vanished_at = now + min(VANISHED_SECONDS, age_seconds)
        if not await outbox.has_vanished(age_seconds) or (waiting := await self._waiting_messages()) is None:
            return
        if waiting:
            count = await outbox.republish_overtaken(age_seconds, MOST_OVERTAKEN)
        else:
            count = await self._republish_vanished(outbox, age_seconds)
        if count:
            metrics.RESCUED.add(count, "message_vanished")
            self._log.warning("relay.republished", count=count, queue=self._settings.queue, reason="message_vanished")

    async def _republish_vanished(self, outbox: Outbox, age_seconds: float) -> int:
        settings = self._settings
        count = 0
        while True:
            moved, uncertain = await outbox.republish_vanished(
                age_seconds,
                BATCH,
                settings.on_uncertain,
                settings.max_attempts,
                doubt_seconds=settings.lease_seconds,
            )
            self._tell_rescued(uncertain, "promotion")
            count += moved
            if not (moved or uncertain):
                return count

    async def _waiting_messages(self) -> int | None:
        """How many messages wait on the send queue; None while there is no such queue."""
        settings = self._settings
        try:
            found = await depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file)
        except TopologyError:
            return None
        return found[settings.queue]

    async def _look_for_pointers(self, outbox: Outbox) -> int:
        """Begins to publish what is due, and where we stop, waits for the confirms; returns how much it was."""
        if not self._gates[self._settings.queue].is_open:
            return 0
        found = await self._pointers.look(outbox, is_last=self._stopping)
        if self._stopping:
            await self._pointers.arrived()
        return found

    async def _publish_pointers(self, due: list[DuePointer]) -> list[bool]:
        pointers = [Pointer(row.email_id, row.message_key, row.correlation_id, row.traceparent) for row in due]
        messages, message_of = Outgoing.of_pointers(self._settings.queue, pointers, self._settings.bundle)
        answers = await self._publish(messages)
        confirmed = [answers[index] for index in message_of]
        metrics.PUBLISHED.add(confirmed.count(True), "send")
        metrics.UNROUTABLE.add(confirmed.count(False), "send")
        self._log.debug("relay.published", count=confirmed.count(True))
        return confirmed

    async def _look_for_dead_letters(self, outbox: Outbox) -> bool:
        """Now and then; at once after some, or where we stop. Returns whether there were any, all of them published."""
        now = time.monotonic()
        if not self._gates[self._settings.dlq].is_open or (now < self._dead_letters_at and not self._stopping):
            return False
        due = await _without_locked(outbox, await outbox.find_dead_letter_due(BATCH + len(outbox.locked)))
        self._dead_letters_at = 0.0 if due else now + POLL_SECONDS
        if not due:
            return False
        confirmed = await self._publish([self._dead_letter(row) for row in due])
        published = {row.email_id: row.failed_at for row, is_told in zip(due, confirmed, strict=True) if is_told}
        metrics.UNROUTABLE.add(confirmed.count(False), "dlq")
        if published:
            await outbox.mark_dead_lettered(published)
            metrics.PUBLISHED.add(len(published), "dlq")
            self._log.info("relay.dead_lettered", count=len(published))
        return len(published) == len(due)

    async def _publish(self, messages: list[Outgoing]) -> Answers:
        self._seat.confirm.begin()
        written_at = time.monotonic()
        confirmed = await self._publisher.publish(messages)
        if any(confirmed):
            self._seat.confirm.end()
            self._seat.served()
        gate = self._gates[messages[0].queue]
        unpublished = confirmed.count(False)
        if not unpublished:
            gate.open()
        elif not gate.has_closed_since(written_at):
            fields = {"queue": messages[0].queue, "retry_in_seconds": round(gate.close(), 2)}
            if confirmed.returned:
                self._log.error("relay.unroutable", count=confirmed.returned, **fields)
            if unpublished > confirmed.returned:
                self._log.error("relay.unconfirmed", count=unpublished - confirmed.returned, **fields)
        if self._broker_outage.worked():
            self._log.info("broker.connected")
        return confirmed

    def _dead_letter(self, row: DueDeadLetter) -> Outgoing:
        letter = DeadLetter(
            email_id=row.email_id,
            tenant_id=row.tenant_id,
            message_key=row.message_key,
            correlation_id=row.correlation_id,
            status=row.status,
            error_type=row.error_type,
            error=row.error,
            attempts=row.attempt_count,
            provider=row.provider,
            created_at=row.created_at,
            failed_at=row.failed_at,
        )
        return Outgoing.of_dead_letter(self._settings.dlq, letter, row.traceparent)


async def _without_locked(outbox: Outbox, due: list[DueDeadLetter]) -> list[DueDeadLetter]:
    """What can be marked once it is published: of the rest there would be a copy per look."""
    locked = await outbox.locked.among([row.email_id for row in due])
    return [row for row in due if row.email_id not in locked] if locked else due


@dataclass(slots=True)
class _Gate:
    """The way to one queue: closed for a while, and longer each time, after RabbitMQ could not route messages there.

    One for each queue, because a DLQ that is missing must not delay an email.
    """

    closed_at: float = 0.0
    opens_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(base_seconds=0.2, cap_seconds=5.0))

    @property
    def is_open(self) -> bool:
        return time.monotonic() >= self.opens_at

    def has_closed_since(self, instant: float) -> bool:
        """Whether messages of that instant belong to a refusal that is known: RabbitMQ refuses many batches at once."""
        return self.closed_at >= instant

    def close(self) -> float:
        seconds = self.backoff.next_wait(random.random)
        self.closed_at = time.monotonic()
        self.opens_at = self.closed_at + seconds
        return seconds

    def open(self) -> None:
        self.backoff.worked()
