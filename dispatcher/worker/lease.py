"""The lease stage: messages → leased emails, in batches.

message ─▶ pointers ─▶ lease (batched; commits before anything is sent) ─▶ leased
             │ no such email: rejected, and        └ no lease: ack, requeue or reject, by the row's status;
             └ RabbitMQ moves it to the DLQ          a dead letter that an operator moved here: rejected
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from typing import Final
from uuid import UUID

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.broker.dead_letter import decode
from dispatcher.broker.pointer import decode as pointers_in
from dispatcher.config import Settings
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidPointer, StatementRefused, StoreUnavailable
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.store.bisection import bisect_batch, report_refused
from dispatcher.store.controls import READ_SECONDS
from dispatcher.store.leases import Lease, LeaseStore, UnleasedEmail
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.worker.controls import OperatorControls
from dispatcher.worker.in_flight_email import InFlightEmail
from dispatcher.worker.lane_inbox import Arrival, LaneInbox
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

REQUEUE_SECONDS: Final = 0.5
"""A message is requeued after this time if its email is in flight in this worker, or if another transaction locks the
email's row."""
PUT_BACK_SECONDS: Final = 2 * READ_SECONDS
"""An email of a paused tenant is due again after this time. By then, every relay has read the pause."""
MAX_REJECTED: Final = 10_000
"""The most emails whose rejected messages a worker remembers."""


@dataclass(eq=False, repr=False)
class LeaseStage:
    """Leases the emails of arriving messages, as many as fit into the prefetch window. `leased`: the next stage, which
    gets the leased emails."""

    settings: Settings
    store: LeaseStore
    broker: Consumer
    outage: StoreOutage
    ledger: Ledger
    window: Window
    controls: OperatorControls
    _: KW_ONLY
    inbox: LaneInbox
    leased: SendStage

    def __post_init__(self) -> None:
        self._log = get_log()
        self._is_stopped = False
        self._rejected: dict[UUID, None] = {}  # oldest first
        self._held_lanes: frozenset[str] = frozenset()
        self._held: list[Arrival] = []

    def take(self, delivery: Delivery) -> None:
        """Queues a message from RabbitMQ. Rejects the message if it contains no valid pointer."""
        # RabbitMQ may still deliver messages after the worker has cancelled its consumers. Ignore these messages,
        # because the worker leases no more emails.
        if self._is_stopped:
            return
        self.controls.wanted.set()
        try:
            pointers = pointers_in(delivery.body)
        except InvalidPointer as error:
            self._log.warning("message.rejected", reason=error.message, octets=len(delivery.body))
            metrics.MESSAGES_REJECTED.add(1)
            self.broker.reject(delivery)
            return
        if delivery.lane in self._held_lanes:
            self._held.append(Arrival(delivery, pointers[0]))
            return
        if len(pointers) == 1:
            self.inbox.add(Arrival(delivery, pointers[0]))
            return
        for part, each in zip(self.broker.split(delivery, len(pointers)), pointers, strict=True):
            self.inbox.add(Arrival(part, each))

    def drop_unleased(self) -> None:
        """Drops the messages whose emails are not leased yet. Call this after the channel has closed: RabbitMQ
        redelivers the messages."""
        self.inbox.clear()
        self._held.clear()

    def hold_lanes(self, lanes: frozenset[str]) -> None:
        """Leases no emails of these lanes until the next call. Emails of all other lanes may be leased. Keeps the
        messages of these lanes for `return_held`."""
        self._held_lanes = lanes
        for lane in lanes:
            self._held += self.inbox.take_lane(lane)

    def return_held(self) -> None:
        """Returns to RabbitMQ the messages that `hold_lanes` has kept. Call this after the consumers of these lanes are
        cancelled."""
        for arrival in self._held:
            self.broker.requeue(arrival.delivery)
        self._held.clear()

    async def run(self) -> None:
        """Leases the emails of arriving messages until cancelled."""
        await self.inbox.lease(self._lease, self.window)

    async def stop(self) -> None:
        """Stops leasing, and returns when the current batch has ended. Unleased messages stay in RabbitMQ."""
        self._is_stopped = True
        self.inbox.clear()
        await self.inbox.finish()

    async def _lease(self, batch: list[Arrival]) -> None:
        if self._is_stopped:
            return
        waiting: dict[UUID, Arrival] = {}
        repeated = []
        for arrival in batch:
            # Do not lease an email in flight again: if PostgreSQL's reply were lost, the worker would release the email
            # while it is on the wire.
            email_id = arrival.pointer.email_id
            if email_id in self.window.emails or waiting.setdefault(email_id, arrival) is not arrival:
                repeated.append(arrival)
        pauses = self.controls.current.pauses
        with self.outage.committing:
            found = await self._lease_with_retries({i: arrival.pointer.message_key for i, arrival in waiting.items()})
        if found is None:
            return
        leases, refused, asked_at = found
        paused = await self.controls.paused_since(pauses, [lease.email_id for lease in leases])
        policy, leased_until = self.settings.on_uncertain, asked_at + self.settings.lease_seconds
        for lease in leases:
            delivery = waiting.pop(lease.email_id).delivery
            email = InFlightEmail(lease, delivery, policy, confirmed_at=asked_at, leased_until=leased_until)
            self.window.emails[lease.email_id] = email
            if paused and lease.email_id in paused:
                self.leased.release(email)
            else:
                self.leased.add(email)
        for email_id in refused:
            self._reject(waiting.pop(email_id).delivery, email_id)
        if without_lease := [*waiting.values(), *repeated]:
            _, culprits = await bisect_batch(without_lease, self._settle)
            for (delivery, pointer), error in culprits:
                report_refused(pointer.email_id, error.message)
                self._reject(delivery, pointer.email_id)

    async def _lease_with_retries(self, keys_by_id: dict[UUID, str]) -> tuple[list[Lease], set[UUID], float] | None:
        """Leases emails, except those whose rows are locked, and retries until PostgreSQL answers. Returns the leases,
        the emails that PostgreSQL refuses to lease, and when the statement was sent (`steady_clock`); None if the stage
        was stopped before the statement was sent again."""
        if not keys_by_id:
            return [], set(), 0.0
        answer_lost = False
        while True:
            try:
                if answer_lost:
                    # If PostgreSQL refuses to release an email, the email stays leased until its lease expires.
                    await bisect_batch(list(keys_by_id), self.store.release_unanswered)
                    answer_lost = False
                if self._is_stopped:
                    return None
                began_at, asked_at = time.perf_counter(), steady_clock()
                outcome = await self.store.locked.execute_unlocked(
                    keys_by_id, lambda free: self._lease_free(free, keys_by_id)
                )
                leases, refused = [*chain.from_iterable(outcome.answers)], set(outcome.refused)
                for email_id in outcome.refused:
                    # The statement that reads the content failed, so lease the email without reading it.
                    with suppress(StatementRefused):
                        lease = await self.store.lease_without_content(
                            email_id,
                            keys_by_id[email_id],
                            self.settings.lease_seconds,
                            self.controls.current.paused_tenants,
                        )
                        leases += [] if lease is None else [lease]
                        refused.remove(email_id)
                metrics.LEASE_EMAILS.observe(len(keys_by_id))
                metrics.LEASE_SECONDS.observe(time.perf_counter() - began_at)
            except StoreUnavailable as error:
                answer_lost = True
                self.ledger.keep_file()  # a hanging session may still commit the leases after this process exits
                await self.outage.wait(error)
            else:
                self.outage.end()
                return leases, refused, asked_at

    async def _lease_free(self, free: set[UUID], keys_by_id: dict[UUID, str]) -> list[Lease]:
        if len(free) < len(keys_by_id):
            keys_by_id = {email_id: keys_by_id[email_id] for email_id in free}
        if not self.ledger.has_database:
            self.ledger.set_database(await self.store.find_database_id())
        try:
            paused_tenants = self.controls.current.paused_tenants
            return await self.store.lease(keys_by_id, self.settings.lease_seconds, paused_tenants)
        except StatementRefused:
            # PostgreSQL may have executed the statement and sent a reply that cannot be read. So release the emails.
            await self.store.release_unanswered(list(keys_by_id))
            raise

    def _reject(self, delivery: Delivery, email_id: UUID) -> None:
        """Rejects the message of an email that PostgreSQL cannot lease; RabbitMQ moves it to the DLQ for an operator.
        Acks later messages about the email: they arrive because the email stays pending, and is published again and
        again."""
        if email_id in self._rejected:
            self.broker.ack([delivery])
            return
        if len(self._rejected) >= MAX_REJECTED:
            del self._rejected[next(iter(self._rejected))]
        self._rejected[email_id] = None
        metrics.MESSAGES_REJECTED.add(1)
        self.broker.reject(delivery)

    async def _settle(self, arrivals: Sequence[Arrival]) -> None:
        """Acks, requeues or rejects messages whose email got no lease."""
        try:
            unleased = await self.store.find_unleased([pointer.email_id for _, pointer in arrivals])
            # Release leases of this worker whose emails are not in its window: PostgreSQL executed the lease statement,
            # but the reply was lost.
            tokens = {i: found.our_token for i, found in unleased.items() if i not in self.window.emails}
            if orphans := {i: token for i, token in tokens.items() if token is not None}:
                await self.store.release_unlocked(orphans)
                unleased |= {i: replace(unleased[i], status=Status.PENDING) for i in orphans}
            # Make the emails of paused tenants due again after PUT_BACK_SECONDS. If their messages went back to the
            # queue instead, RabbitMQ would deliver them again and again during the pause.
            tenants, put_back = self.controls.current.paused_tenants, set[UUID]()
            pending = [i for i, found in unleased.items() if found.status is Status.PENDING and not found.is_left_out]
            if tenants and pending:
                put_back = await self.store.put_back(pending, tenants, PUT_BACK_SECONDS)
        except StoreUnavailable as error:
            await self.outage.wait(error)
            for delivery, _ in arrivals:
                self.broker.requeue(delivery)
            return
        self.broker.ack([each.delivery for each in arrivals if self._is_done(each, unleased, put_back)])

    def _is_done(self, arrival: Arrival, unleased: dict[UUID, UnleasedEmail], put_back: set[UUID]) -> bool:
        """Returns whether to ack the message. If not, requeues or rejects the message."""
        delivery, pointer = arrival
        found = unleased.get(pointer.email_id)
        if found is None or found.message_key != pointer.message_key:
            reason = "no such email" if found is None else "the email with this id has a different message key"
            self._log.warning("message.rejected", reason=reason, email_id=str(pointer.email_id))
            metrics.MESSAGES_REJECTED.add(1)
            self.broker.reject(delivery)
            return False
        if pointer.email_id in put_back:
            return True
        if found.status in (Status.FAILED, Status.HELD) and _is_dead_letter(delivery):
            # Only an operator can have moved it to a send queue.
            remedy = f'Run `dispatcher dlq replay {pointer.email_id} --reason "…"` to send the email again.'
            self._log.warning("message.returned", email_id=str(pointer.email_id), remedy=remedy)
            self.broker.reject(delivery)
            return False
        if found.status is Status.PENDING and not found.is_left_out:
            # The email was released between the two queries, so a worker can lease it at the next delivery. Requeue the
            # message: at once, or after REQUEUE_SECONDS if this worker has no reply yet to its release statement, or if
            # another transaction locks the row.
            is_late = pointer.email_id in self.window.emails or pointer.email_id in self.store.locked
            seconds = REQUEUE_SECONDS if is_late else 0.0
            asyncio.get_running_loop().call_later(seconds, self.broker.requeue, delivery)
            return False
        # In all other cases, ack the message, because this worker need not send the email. The email may be finished,
        # or not due yet. Another worker may have leased the email: that worker, or recovery, will finish it. Or no
        # worker may lease the email, for example because an event proved that it was sent: the relay will finish it.
        metrics.DUPLICATES.add(1, found.status)
        self._log.debug("message.duplicated", email_id=str(pointer.email_id), status=found.status)
        return True


def _is_dead_letter(delivery: Delivery) -> bool:
    try:
        decode(delivery.body)
    except InvalidPointer:
        return False
    return True
