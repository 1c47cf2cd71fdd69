"""The lease stage: messages → leased emails, in batches.

message ─▶ pointers ─▶ lease (batched; commits before anything leaves) ─▶ leased
             │ points to no email: to the DLQ      └ no lease: settled by what its row says: ack, requeue, or
             └ (RabbitMQ does it, as we reject it)   reject; a dead letter that a person put back: replayed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple
from uuid import UUID

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.broker.dead_letter import decode
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.pointer import decode as pointers_in
from dispatcher.config import Settings
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidPointer, StatementRefused, StoreUnavailable
from dispatcher.host.batches import Batches
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.store.apart import apart
from dispatcher.store.leases import Lease, LeaseStore, LetterVerdict, Standing
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.worker.in_flight_email import InFlightEmail
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.report import report_lease
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window


class Arrival(NamedTuple):
    """A message, or a part of one, that points to an email."""

    delivery: Delivery
    pointer: Pointer


IN_HAND_SECONDS: Final = 0.5
"""How often a message may come back while its email is still in hand, here or in somebody's transaction."""
MOST_REJECTED: Final = 10_000
"""The most emails for which a worker remembers that it sent a message to the DLQ."""


class LeaseStage:
    """Takes leases for what arrives, as far as the window has room."""

    def __init__(
        self,
        settings: Settings,
        store: LeaseStore,
        broker: Consumer,
        outage: StoreOutage,
        ledger: Ledger,
        window: Window,
        *,
        inbox: Batches[Arrival],
        leased: SendStage,
    ) -> None:
        """
        Args:
            leased: Outbox.
        """
        self._settings = settings
        self._store = store
        self._broker = broker
        self._outage = outage
        self._ledger = ledger
        self._window = window
        self._inbox = inbox
        self._leased = leased
        self._log = get_log()
        self._is_stopped = False
        self._rejected: dict[UUID, None] = {}  # in order, the oldest first

    def take(self, delivery: Delivery) -> None:
        """Takes a message from the broker; what points to no email goes to the DLQ."""
        # RabbitMQ may be slow to hear that we stop. Nothing would make room for it, and the stop would wait for that.
        if self._is_stopped:
            return
        try:
            pointers = pointers_in(delivery.body)
        except InvalidPointer as error:
            self._log.warning("message.rejected", reason=error.message, octets=len(delivery.body))
            metrics.MESSAGES_REJECTED.add(1)
            self._broker.reject(delivery)
            return
        if len(pointers) == 1:
            self._inbox.add(Arrival(delivery, pointers[0]))
            return
        for part, each in zip(self._broker.split(delivery, len(pointers)), pointers, strict=True):
            self._inbox.add(Arrival(part, each))

    def forget(self) -> None:
        """Drops what was delivered and not leased: its channel is gone, and RabbitMQ delivers it again."""
        self._inbox.clear()

    async def run(self) -> None:
        """Leases until cancelled."""
        # Probes are taken in random order, because the emails that the provider refuses may have come all together.
        await self._inbox.run(self._lease, room=self._window.room, takes_any=self._window.is_probing)

    async def stop(self) -> None:
        """Takes no more leases, and returns once the batch under way has ended; what waits stays with the broker."""
        self._is_stopped = True
        self._inbox.clear()
        await self._inbox.finish()

    async def _lease(self, batch: list[Arrival]) -> None:
        if self._is_stopped:
            return
        waiting: dict[UUID, Arrival] = {}
        repeated = [arrival for arrival in batch if not self._is_first(arrival, waiting)]
        with self._outage.committing:
            found = await self._lease_surely({i: arrival.pointer.message_key for i, arrival in waiting.items()})
        if found is None:
            return
        leases, refused, asked_at = found
        policy, leased_until = self._settings.on_uncertain, asked_at + self._settings.lease_seconds
        for lease in leases:
            delivery = waiting.pop(lease.email_id).delivery
            email = InFlightEmail(lease, delivery, policy, confirmed_at=asked_at, leased_until=leased_until)
            self._window.emails[lease.email_id] = email
            self._leased.add(email)
        for email_id in refused:
            self._reject(waiting.pop(email_id).delivery, email_id)
        if without_lease := [*waiting.values(), *repeated]:
            await self._settle(without_lease)

    def _is_first(self, arrival: Arrival, waiting: dict[UUID, Arrival]) -> bool:
        """Whether this message is to lease its email; notes it so.

        Never one that is in hand: were the answer to its lease lost, we would give back an email that is on the wire.
        """
        email_id = arrival.pointer.email_id
        return email_id not in self._window.emails and waiting.setdefault(email_id, arrival) is arrival

    async def _lease_surely(self, keys_by_id: dict[UUID, str]) -> tuple[list[Lease], set[UUID], float] | None:
        """The leases, however long PostgreSQL is away, and the emails that it refuses to lease at all.

        Last comes when the statement was sent, by `steady_clock`. Locked emails get no lease. None if we were stopped
        meanwhile, and then there are no leases.
        """
        if not keys_by_id:
            return [], set(), 0.0
        answer_lost = False
        while True:
            try:
                if answer_lost:
                    # What PostgreSQL refuses to release stays leased until the lease ends.
                    await apart(list(keys_by_id), self._store.release_unanswered)
                    answer_lost = False
                if self._is_stopped:
                    return None
                began_at, asked_at = time.perf_counter(), steady_clock()
                around = await self._store.locked.around(keys_by_id, lambda free: self._lease_free(free, keys_by_id))
                leases, refused = [*chain.from_iterable(around.answers)], set(around.refused)
                for email_id in around.refused:
                    with suppress(StatementRefused):
                        leases += await self._lease_unread(email_id, keys_by_id[email_id])
                        refused.remove(email_id)
                report_lease(len(keys_by_id), time.perf_counter() - began_at)
            except StoreUnavailable as error:
                answer_lost = True
                self._ledger.leave_to_relay()  # a session that hangs may commit the leases after we have ended
                await self._outage.wait(error)
            else:
                self._outage.over()
                return leases, refused, asked_at

    async def _lease_free(self, free: set[UUID], keys_by_id: dict[UUID, str]) -> list[Lease]:
        if len(free) < len(keys_by_id):
            keys_by_id = {email_id: keys_by_id[email_id] for email_id in free}
        if not self._ledger.is_named:
            self._ledger.name_database(await self._store.find_database_id())
        try:
            return await self._store.lease(keys_by_id, self._settings.lease_seconds)
        except StatementRefused:
            # Where the answer was unreadable, the statement was executed.
            await self._store.release_unanswered(list(keys_by_id))
            raise

    async def _lease_unread(self, email_id: UUID, message_key: str) -> list[Lease]:
        """The lease of an email that could not be leased with its content, if it may be leased."""
        lease = await self._store.lease_unread(email_id, message_key, self._settings.lease_seconds)
        return [] if lease is None else [lease]

    async def _settle(self, arrivals: list[Arrival]) -> None:
        """Settles what got no lease. The message of an email that PostgreSQL cannot read goes to the DLQ."""
        _, culprits = await apart(arrivals, self._settle_all)
        for (delivery, pointer), error in culprits:
            self._log.error("email.statement_failed", email_id=str(pointer.email_id), reason=error.message)
            self._reject(delivery, pointer.email_id)

    def _reject(self, delivery: Delivery, email_id: UUID) -> None:
        """Sends the message of an email that PostgreSQL refuses to lease to the DLQ, where an operator finds the email.

        Does so once for each email: since it stays pending, the relay publishes it again and again. Later messages are
        acked.
        """
        if email_id in self._rejected:
            self._broker.ack([delivery])
            return
        if len(self._rejected) >= MOST_REJECTED:
            del self._rejected[next(iter(self._rejected))]
        self._rejected[email_id] = None
        metrics.MESSAGES_REJECTED.add(1)
        self._broker.reject(delivery)

    async def _settle_all(self, arrivals: Sequence[Arrival]) -> None:
        try:
            standing = await self._store.find_standing([pointer.email_id for _, pointer in arrivals])
            # A lease of ours that nobody here knows: its statement was cut off, and went on without us.
            tokens = {i: found.our_token for i, found in standing.items() if i not in self._window.emails}
            if orphans := {i: token for i, token in tokens.items() if token is not None}:
                await self._store.release_free(orphans)
                standing |= {i: replace(standing[i], status=Status.PENDING) for i in orphans}
            arrivals = await self._replay_letters(arrivals, standing)
        except StoreUnavailable as error:
            await self._outage.wait(error)
            for delivery, _ in arrivals:
                self._broker.requeue(delivery)
            return
        self._broker.ack([delivery for delivery, pointer in arrivals if self._is_done(delivery, pointer, standing)])

    async def _replay_letters(self, arrivals: Sequence[Arrival], standing: dict[UUID, Standing]) -> Sequence[Arrival]:
        """Settles the dead letters among what got no lease: a person has put them here. Returns the other messages."""
        dead = [(d, p) for d, p in arrivals if _is_dead(standing.get(p.email_id), p)]
        letters = [(delivery, letter) for delivery, _ in dead if (letter := _letter_in(delivery))]
        if not letters:
            return arrivals
        attempts = {letter.email_id: letter.attempts for _, letter in letters}
        verdicts = await self._store.replay_letters(attempts)
        for delivery, letter in letters:
            verdict = verdicts.get(letter.email_id)
            if verdict is None:
                self._requeue_later(delivery)
                continue
            self._log.info("message.returned", email_id=str(letter.email_id), verdict=verdict)
            if verdict is LetterVerdict.REFUSED:
                self._broker.reject(delivery)  # to the DLQ, from where it came
            else:
                self._broker.ack([delivery])
        settled = {delivery.tag for delivery, _ in letters}
        return [arrival for arrival in arrivals if arrival.delivery.tag not in settled]

    def _is_done(self, delivery: Delivery, pointer: Pointer, standing: dict[UUID, Standing]) -> bool:
        """Whether the message has done its work; where it points to nothing or must come again, tells the broker so."""
        found = standing.get(pointer.email_id)
        if found is None or found.message_key != pointer.message_key:
            reason = "no such email" if found is None else "its message key belongs to another email"
            self._log.warning("message.rejected", reason=reason, email_id=str(pointer.email_id))
            metrics.MESSAGES_REJECTED.add(1)
            self._broker.reject(delivery)
            return False
        if found.status is Status.PENDING:
            # Its owner gave it back between our two looks: the next delivery can lease it. If that owner is us, we have
            # not yet heard so from PostgreSQL, and the next delivery need not hurry; nor if somebody has it locked.
            if pointer.email_id in self._window.emails or pointer.email_id in self._store.locked:
                self._requeue_later(delivery)
            else:
                asyncio.get_running_loop().call_soon(self._broker.requeue, delivery)
            return False
        # Finished, or another's: the row's owner or the rescue has it. A message is only a hint.
        metrics.DUPLICATES.add(1, found.status)
        self._log.debug("message.duplicated", email_id=str(pointer.email_id), status=found.status)
        return True

    def _requeue_later(self, delivery: Delivery) -> None:
        asyncio.get_running_loop().call_later(IN_HAND_SECONDS, self._broker.requeue, delivery)


def _is_dead(found: Standing | None, pointer: Pointer) -> bool:
    return (
        found is not None and found.message_key == pointer.message_key and found.status in (Status.FAILED, Status.HELD)
    )


def _letter_in(delivery: Delivery) -> DeadLetter | None:
    """The dead letter that a message is; None for a pointer, which is all that machines put on the send queue."""
    try:
        return decode(delivery.body)
    except InvalidPointer:
        return None
