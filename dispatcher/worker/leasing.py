"""From arrivals to leases, in batches; and what becomes of a delivery that got none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.broker.pointer import Pointer
from dispatcher.domain.status import Status
from dispatcher.errors import StoreUnavailable
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.telemetry.log import get_log
from dispatcher.worker.batches import Batches
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.sending import steady_clock

Arrival = tuple[Delivery, Pointer]


class Leasing:
    """Takes leases for what arrives, as far as there is room to send."""

    def __init__(
        self,
        store: LeaseStore,
        consumer: Consumer,
        outage: StoreOutage,
        *,
        lease_seconds: float,
        room: Callable[[], int],
        begin: Callable[[Lease, Delivery, float], None],
    ) -> None:
        """
        Args:
            room: How many more emails may be under lease here.
            begin: Takes a lease, its delivery, and when the lease ends at the earliest (`steady_clock`).
        """
        self._store = store
        self._consumer = consumer
        self._outage = outage
        self._lease_seconds = lease_seconds
        self._begin = begin
        self._log = get_log()
        self._arrivals: Batches[Arrival] = Batches(self._lease, room=room)
        self._open = asyncio.Event()
        self._open.set()
        self._stopped = False

    def add(self, delivery: Delivery, pointer: Pointer) -> None:
        """Queues a delivery for a lease."""
        self._arrivals.add((delivery, pointer))

    def forget(self) -> None:
        """Drops the deliveries that wait for a lease."""
        self._arrivals.take_all()

    def wake(self) -> None:
        """Looks again whether there is room."""
        self._arrivals.wake()

    async def run(self) -> None:
        """Leases until cancelled."""
        await self._arrivals.run()

    def pause(self) -> None:
        """Takes no leases until `resume`; deliveries wait."""
        self._open.clear()

    def resume(self) -> None:
        """Ends a pause."""
        self._open.set()

    async def stop(self) -> None:
        """Takes no more leases, and returns once the batch under way has ended; what waits stays with the broker."""
        self._stopped = True
        self._arrivals.take_all()
        self._open.set()
        await self._arrivals.finish()

    async def _lease(self, batch: list[Arrival]) -> None:
        await self._open.wait()
        if self._stopped:
            return
        waiting: dict[UUID, Arrival] = {}
        repeated = [arrival for arrival in batch if waiting.setdefault(arrival[1].email_id, arrival) is not arrival]
        leased_until = steady_clock() + self._lease_seconds
        leases = await self._lease_surely({email_id: pointer.message_key for email_id, (_, pointer) in waiting.items()})
        if leases is None:
            return
        for lease in leases:
            delivery, _ = waiting.pop(lease.email_id)
            self._begin(lease, delivery, leased_until)
        if without_lease := [*waiting.values(), *repeated]:
            await self._settle(without_lease)

    async def _lease_surely(self, keys_by_id: dict[UUID, str]) -> list[Lease] | None:
        """The leases, however long PostgreSQL is away; None if we were stopped meanwhile."""
        answer_lost = False
        while not self._stopped:
            try:
                if answer_lost:
                    await self._store.release_unanswered(list(keys_by_id))
                leases = await self._store.lease(keys_by_id, self._lease_seconds)
            except StoreUnavailable as error:
                answer_lost = True
                await self._outage.wait(error)
            else:
                self._outage.over()
                return leases
        return None

    async def _settle(self, arrivals: list[Arrival]) -> None:
        try:
            standing = await self._store.find_standing([pointer.email_id for _, pointer in arrivals])
        except StoreUnavailable as error:
            await self._outage.wait(error)
            for delivery, _ in arrivals:
                self._consumer.requeue(delivery)
            return
        self._consumer.ack([delivery for delivery, pointer in arrivals if self._is_done(delivery, pointer, standing)])

    def _is_done(self, delivery: Delivery, pointer: Pointer, standing: dict[UUID, tuple[str, Status]]) -> bool:
        """Whether the message has done its work; where it points to nothing or must come again, tells the broker so."""
        message_key, status = standing.get(pointer.email_id, (None, None))
        if message_key != pointer.message_key:
            reason = "no such email" if message_key is None else "its message key belongs to another email"
            self._log.warning("message.rejected", reason=reason, email_id=str(pointer.email_id))
            self._consumer.reject(delivery)
            return False
        if status is Status.PENDING:
            # Its owner gave it back between our two looks: the next delivery can lease it.
            self._consumer.requeue(delivery)
            return False
        # Finished, or another's: the row's owner or the rescue has it. A message is only a hint.
        self._log.debug("message.duplicated", email_id=str(pointer.email_id), status=status)
        return True
