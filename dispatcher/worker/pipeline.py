"""An email's way through a worker: lease, send, decide, record, ack.

    take ─▶ lease (batched) ─▶ send (one task per email) ─▶ decide ─▶ record (batched) ─▶ ack (batched)
              │ no lease: settled by what its row says         │ retry: waits under the same lease
              └▶ ack, requeue, or reject to the DLQ            └▶ send again

Emails that share a call need no task while it is under way: nearly all are accepted, and concluded as the answer comes.

Where something is away, this is what waits: without PostgreSQL, results and deliveries; without RabbitMQ, acks are
dropped with the channel that they belonged to, and the redelivery finds the row as it stands; without the provider,
nothing is leased.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.broker.pointer import decode
from dispatcher.config import Settings
from dispatcher.domain.decision import RetryIn, decide
from dispatcher.domain.outcome import Deferred, Outcome, Uncertain
from dispatcher.domain.retry import RetryPolicy
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError, InvalidPointer, StoreUnavailable
from dispatcher.host.batches import Batches
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import Flight
from dispatcher.host.lifecycle import unless_cut_off
from dispatcher.host.roster import Seat
from dispatcher.routing.routes import Routes
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.results import result_of
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.worker.attempts import Attempts, NoRoute, Ride, TryLater
from dispatcher.worker.contents import Contents, NoMemory
from dispatcher.worker.leasing import Leasing
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.recorder import LOCKED_SECONDS, Closing, Recorder
from dispatcher.worker.sending import LeaseRanOut, Phase, Sending
from dispatcher.worker.telling import tell_attempt
from dispatcher.worker.watch import ProviderWatch

RENEWALS_PER_LEASE: Final = 3
"""A lease is renewed at a third of its length, also while its email waits for a retry: two more tries before it ends,
and other hosts see that its owner is alive (see `relay.unrenewed`)."""


SHOW_SECONDS: Final = 1.0
FULL_SHARE: Final = 2
"""One part of so many of the window is worth a statement: while it is recorded, the others are on their way."""
SCARCE_SHARE: Final = 4
"""Where less than one part of so many of the window is free, each record makes room that is about to be needed."""


class Pipeline:
    """Everything between a delivery and its ack, for one worker."""

    def __init__(
        self,
        settings: Settings,
        *,
        consumer: Consumer,
        store: LeaseStore,
        routes: Routes,
        watch: ProviderWatch,
        ledger: Ledger,
        seat: Seat,
    ) -> None:
        """
        Args:
            watch: Made the breakers of `routes`.
            seat: Where it says whether commits and acks flow.
        """
        self._settings = settings
        self._policy = RetryPolicy(settings.max_attempts, settings.retry_base_seconds, settings.retry_cap_seconds)
        self._consumer = consumer
        self._store = store
        self._routes = routes
        self._watch = watch
        self._ledger = ledger
        self._attempts = Attempts(
            routes,
            ledger,
            timeout_seconds=settings.send_timeout_seconds,
            allowed_headers=settings.allowed_headers,
        )
        self._log = get_log()
        self._loop = asyncio.get_running_loop()
        self._seat = seat
        self._outage = StoreOutage(seat.commit)
        self._draining = False
        self._active: dict[UUID, Sending] = {}
        self._leasing = Leasing(
            store,
            consumer,
            self._outage,
            ledger,
            lease_seconds=settings.lease_seconds,
            room=self._room,
            in_hand=self._active.__contains__,
            is_probing=lambda: routes.is_probing,
            begin=self._begin,
        )
        self._waiting_count = 0
        self._recorder = Recorder(
            store,
            self._outage,
            self._close,
            full=settings.prefetch // FULL_SHARE,
            is_awaited=lambda: self._room() < settings.prefetch // SCARCE_SHARE,
        )
        self._returns: Batches[Sending] = Batches(self._release)
        self._contents = Contents(
            store,
            self._outage,
            octets=settings.worker_memory_mb * 1_000_000,
            copies=routes.copies,
            window=settings.prefetch,
            waiting=self._waiting,
        )
        self.sent_count = 0
        self.finished_count = 0
        self.released_count = 0

    def take(self, delivery: Delivery) -> None:
        """Takes a message from the broker; what points to no email goes to the DLQ."""
        try:
            pointers = decode(delivery.body)
        except InvalidPointer as error:
            self._log.warning("message.rejected", reason=error.message, octets=len(delivery.body))
            metrics.MESSAGES_REJECTED.add(1)
            self._consumer.reject(delivery)
            return
        if len(pointers) == 1:
            self._leasing.add(delivery, pointers[0])
            return
        for part, pointer in zip(self._consumer.split(delivery, len(pointers)), pointers, strict=True):
            self._leasing.add(part, pointer)

    def forget_arrivals(self) -> None:
        """Drops what was delivered and not leased: its channel is gone, and RabbitMQ delivers it again."""
        self._leasing.forget()

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(unless_cut_off(self._leasing.run))
            group.create_task(unless_cut_off(self._recorder.run))
            group.create_task(unless_cut_off(self._returns.run))
            group.create_task(unless_cut_off(self._renew))
            group.create_task(self._show_in_flight())
            group.create_task(unless_cut_off(self._watch.run, self._routes, self._consumer, self._leasing.wake))

    async def drain(self, seconds: float) -> None:
        """Gives back what nothing has left of, waits for what is on the wire, and records.

        What got no answer in that time is recorded as uncertain. The caller has stopped the deliveries.
        """
        self._draining = True
        loop = asyncio.get_running_loop()
        stop_at = loop.time() + seconds
        # At once, since leasing may wait for PostgreSQL, and nothing may leave in the last moment; and what it leased.
        self._stop_stoppable()
        await self._leasing.stop()
        self._stop_stoppable()
        while (left := stop_at - loop.time()) > 0 and (work := self._work()):
            await asyncio.wait(work, timeout=left)
        for sending in list(self._active.values()):
            if sending.phase is Phase.ON_THE_WIRE:
                self._conclude(sending, Uncertain("The worker had to stop before the provider answered."))
            else:
                # Its task was cancelled before its first step, and so never heard of it; or is slow to hear.
                self._give_back_stopped(sending)
        await self._recorder.finish()
        await self._returns.finish()

    def _stop_stoppable(self) -> None:
        for sending in list(self._active.values()):
            if sending.may_be_stopped and not sending.is_cancelled:
                sending.stop()

    def _work(self) -> list[asyncio.Future[Any]]:
        """What the emails in hand wait for, but for their records."""
        return [work for sending in self._active.values() if (work := sending.work) is not None]

    def _room(self) -> int:
        """How many more emails may be leased: none while no provider may be tried, one for a probe.

        Those that wait for a retry hold up no others, up to as many again.
        """
        room = self._routes.room
        ledger_room = 2 * self._settings.prefetch - len(self._active)
        if room is None:
            busy = len(self._active) - self._waiting_count
            return min(self._settings.prefetch - busy, ledger_room)
        # What was on the wire when the provider failed may stay there until its deadline: no reason not to probe.
        preparing = sum(sending.phase is Phase.PREPARING for sending in self._active.values())
        return max(0, min(room - preparing, ledger_room))

    def _begin(self, lease: Lease, delivery: Delivery, asked_at: float) -> None:
        sending = Sending(
            lease=lease,
            delivery=delivery,
            policy=lease.on_uncertain or self._settings.on_uncertain,
            attempt_number=lease.attempt_number,
            confirmed_at=asked_at,
            leased_until=asked_at + self._settings.lease_seconds,
            email=lease.email,
        )
        self._active[lease.email_id] = sending
        ride = self._attempts.begin(sending)
        if ride is None:
            self._go_on(sending)
        else:
            sending.carried = ride.outcome
            ride.outcome.add_done_callback(lambda _: self._end_ride(sending, ride))

    def _go_on(self, sending: Sending, ride: Ride | None = None) -> None:
        sending.task = self._loop.create_task(self._send(sending, ride))  # half of what asyncio's own way costs

    def _end_ride(self, sending: Sending, ride: Ride) -> None:
        """Concludes an email whose call has ended, where it was accepted; all else is for a task of its own."""
        sending.carried = None
        if (accepted := self._attempts.accepted(sending, ride)) is None:
            self._go_on(sending, ride)
            return
        try:
            self._conclude(sending, accepted)
        except Exception as error:  # noqa: BLE001 - as in `_send`
            self._conclude(sending, self._attempts.failed(sending, error))

    async def _send(self, sending: Sending, ride: Ride | None) -> None:
        """Sends one email, again where it is deferred, until its outcome is final or it is given back.

        Args:
            ride: Its first attempt, where that is under way or over.
        """
        try:
            while True:
                wait_seconds, ride = await self._attempt(sending, ride), None
                if wait_seconds is None:
                    return
                await self._until_recorded(sending, wait_seconds)
                sending.phase = Phase.WAITING
                if self._draining or sending.lease_lost:
                    break
                await self._wait_for_retry(wait_seconds)
                sending.attempt_number += 1
        except (NoRoute, NoMemory) as error:
            sending.away_seconds = error.away_seconds
        except LeaseRanOut:
            pass
        except asyncio.CancelledError:
            if sending.phase is Phase.ON_THE_WIRE:  # the process ends: its ledger says so
                raise
        except Exception as error:  # noqa: BLE001 - an adapter's bug, such as an answer that is none
            # Nobody waits for this task: the email would be leased, and have its place here, for as long as we live.
            wait_seconds = self._conclude(sending, self._attempts.failed(sending, error))
            if wait_seconds is None:
                return
            await self._until_recorded(sending, wait_seconds)
            sending.phase = Phase.WAITING
        self._give_back(sending)

    async def _attempt(self, sending: Sending, ride: Ride | None) -> float | None:
        """Makes and concludes one attempt, which may have to wait for the answers to others; see `_conclude`."""
        while True:
            try:
                return await self._attempt_now(sending, ride)
            except TryLater as later:
                if self._draining or sending.is_over or sending.lease_lost:
                    raise NoRoute from later
                ride = None
                self._attempts.forget(sending)
                sending.phase = Phase.WAITING
                await self._wait_for_retry(later.seconds)

    async def _attempt_now(self, sending: Sending, ride: Ride | None) -> float | None:
        """Makes and concludes one attempt. Content that was not leased with its email is read for it."""
        if not sending.lease.octets_apart:
            return self._conclude(sending, await self._attempts.make(sending, ride))
        async with self._contents.held(sending):
            return self._conclude(sending, await self._attempts.make(sending))

    async def _wait_for_retry(self, seconds: float) -> None:
        with self._waiting():
            await asyncio.sleep(seconds)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Lets other emails take the place of one that waits."""
        self._waiting_count += 1
        self._leasing.wake()
        try:
            yield
        finally:
            self._waiting_count -= 1

    def _give_back_stopped(self, sending: Sending) -> None:
        if sending.may_be_stopped:
            self._give_back(sending)

    def _give_back(self, sending: Sending) -> None:
        """Ends what nothing left of, or of which the provider says that it took nothing. A second call is harmless."""
        # Concluded already, where the drain ran out of time.
        if sending.is_over:
            return
        self._attempts.forget(sending)
        sending.phase = Phase.RETURNING
        self._returns.add(sending)

    def _conclude(self, sending: Sending, outcome: Outcome) -> float | None:
        """Decides what an outcome means and queues it for the record; returns the wait before a retry, or None."""
        if sending.is_over:
            # The drain ran out of time, and has concluded or given it back before the answer came.
            return None
        finished_at = sending.attempted_until
        if sending.ledger_slot is not None:
            self._ledger.answered(sending.ledger_slot, outcome, finished_at=finished_at)
        fails_over = self._attempts.may_fail_over(sending, outcome)
        # What one provider asks us to wait is nothing to the next.
        judged = replace(outcome, retry_after=None) if fails_over and isinstance(outcome, Deferred) else outcome
        number = sending.attempt_number - sending.lease.attempt_base
        decision = decide(judged, number, sending.policy, self._policy, random.random)
        wait_seconds = decision.seconds if isinstance(decision, RetryIn) else None
        if wait_seconds is not None and fails_over:
            wait_seconds = 0.0
        else:
            sending.refused_by.clear()
        lease_seconds = None if wait_seconds is None else wait_seconds + self._settings.lease_seconds
        if lease_seconds is not None:
            sending.recorded = self._loop.create_future()
        flight = Flight(
            sending.lease.email_id,
            sending.lease.token,
            sending.attempt_number,
            sending.provider,
            sending.started_at,
            sending.policy,
            finished_at,
        )
        result = result_of(flight, outcome, decision, lease_seconds=lease_seconds)
        sending.phase = Phase.RECORDING
        self._recorder.add(Closing(sending, result))
        tell_attempt(sending, outcome, result.status, finished_at)
        return wait_seconds

    async def _until_recorded(self, sending: Sending, wait_seconds: float) -> None:
        assert sending.recorded is not None
        asked_at = steady_clock()
        await sending.recorded
        sending.confirm(asked_at, wait_seconds + self._settings.lease_seconds)

    def _close(self, batch: list[Closing]) -> None:
        """Ends what a commit has recorded: frees the ledger, acks, or lets the retry go on."""
        finished: list[Delivery] = []
        for closing in batch:
            sending = closing.sending
            self._attempts.forget(sending)
            # Acked even where it is to be tried again: the row is ours, and no slot of the window waits with it.
            finished.append(sending.delivery)
            if closing.result.status is Status.SENDING and sending.recorded is not None:
                sending.recorded.set_result(None)
                continue
            self.sent_count += closing.result.status is Status.SENT
            self.finished_count += 1
            del self._active[sending.email_id]
        self._consumer.ack(finished)
        self._leasing.wake()

    async def _release(self, batch: list[Sending]) -> None:
        """Gives back leases under which nothing left: pending and due again, so their messages have done their work.

        An email whose provider is away while others work, or for which there is no memory, is due later: leased at
        once, it would only come back again.
        """
        tokens = {sending.email_id: sending.lease.token for sending in batch}
        away_seconds = {sending.email_id: sending.away_seconds for sending in batch}
        locked: set[UUID] | None = None
        while locked is None:
            try:
                locked = await self._store.release_free(tokens, away_seconds)
            except StoreUnavailable as error:
                await self._outage.wait(error)
        self._outage.over()
        for sending in batch:
            if sending.email_id in locked:
                self._returns.add_later(sending, LOCKED_SECONDS)
        batch = [sending for sending in batch if sending.email_id not in locked]
        self.released_count += len(batch)
        for sending in batch:
            del self._active[sending.email_id]
        self._consumer.ack([sending.delivery for sending in batch])
        self._leasing.wake()

    async def _renew(self) -> None:
        """Keeps the leases of slow sends and of emails that wait for a retry, and finds those that were lost."""
        lease_seconds = self._settings.lease_seconds
        while True:
            await asyncio.sleep(lease_seconds / RENEWALS_PER_LEASE / 2)
            now = steady_clock()
            old = {
                email_id: sending
                for email_id, sending in self._active.items()
                if not sending.lease_lost and now - sending.confirmed_at > lease_seconds / RENEWALS_PER_LEASE
            }
            if not old:
                continue
            try:
                ours, locked = await self._renew_free({i: sending.lease.token for i, sending in old.items()})
            except DispatcherError as error:
                self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=lease_seconds / 6)
                continue
            for email_id in old.keys() - locked:
                self._note_renewal(old[email_id], now, is_ours=email_id in ours)

    async def _renew_free(self, tokens: dict[UUID, int]) -> tuple[set[UUID], set[UUID]]:
        """Renews what can be renewed; returns what is still ours, and what is locked or refused, which is unknown."""
        seconds = self._settings.lease_seconds
        around = await self._store.locked.around(
            tokens, lambda free: self._store.renew({i: tokens[i] for i in free}, seconds)
        )
        return set().union(*around.answers), around.locked | around.refused.keys()

    async def _show_in_flight(self) -> None:
        # Now and then, and not per email: whoever looks at a gauge sees moments.
        acked = 0
        while True:
            metrics.IN_FLIGHT.set(len(self._active))
            if self._consumer.acked_count != acked:
                acked = self._consumer.acked_count
                self._seat.served()
            await asyncio.sleep(SHOW_SECONDS)

    def _note_renewal(self, sending: Sending, asked_at: float, *, is_ours: bool) -> None:
        if is_ours:
            sending.confirm(asked_at, self._settings.lease_seconds)
        elif self._active.get(sending.email_id) is sending and sending.may_be_stopped:
            # Not one that is being recorded: its lease has ended because it is done.
            sending.lease_lost = True
            sending.stop()
            if (task := sending.task) is not None:
                # One that was cancelled before its first step has not heard of it, and gives nothing back.
                task.add_done_callback(lambda _: self._give_back_stopped(sending))
