"""The record stage: outcomes → committed → acked, in batches. It keeps outcomes during an outage of PostgreSQL.

outcome ─▶ record (batched) ─▶ committed: clear the ledger slot, ack the message
             │ row locked: tried later      └ deferred: back to the send stage, or released if the lease was lost
             │ reply lost: first check whether the result is recorded already
             └ refused: split until the faulty result is alone; record it without the provider's texts, or retry later
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.domain.status import Status
from dispatcher.errors import SchemaError, StatementRefused, StoreBusy, StoreUnavailable
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.store.bisection import bisect_batch, report_refused
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.worker.in_flight_email import EmailEvent, EmailState, EndedAttempt
from dispatcher.worker.outage import LOCKED_SECONDS, StoreOutage
from dispatcher.worker.report import report_record
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

REFUSED_SECONDS: Final = 2.0
"""The wait before the next try to record a result that PostgreSQL refuses even without the provider's texts."""
FULL_SHARE: Final = 2
"""A full batch is half (1 / FULL_SHARE) of the window: while this half is recorded, the other half is sent."""
LEAST_APART: Final = 64
"""How many acceptances, at least, are recorded apart from the other results of a batch. Acceptances alone need a third
less work. A second statement and commit cost as much as this saves for 30 emails."""


@dataclass(eq=False, repr=False)
class RecordStage:
    """Keeps every result until the result is committed. Acks an email's message only after the commit."""

    store: LeaseStore
    broker: Consumer
    outage: StoreOutage
    ledger: Ledger
    window: Window
    _: KW_ONLY
    inbox: BatchQueue[EndedAttempt]
    deferred: SendStage
    sent_count: int = field(default=0, init=False)
    finished_count: int = field(default=0, init=False)

    async def run(self, prefetch: int) -> None:
        await self.inbox.run(self._record, full=prefetch // FULL_SHARE, is_urgent=self.window.is_scarce)

    async def _record(self, batch: list[EndedAttempt]) -> None:
        with self.outage.committing:
            for ended in batch:
                if ended.email.state is EmailState.IN_DOUBT:
                    await self._record_or_split([ended])
            certain = [ended for ended in batch if ended.email.state in (EmailState.ANSWERED, EmailState.REFUSED)]
            accepted = [ended for ended in certain if ended.result.is_acceptance]
            parts = [certain]
            if LEAST_APART <= len(accepted) < len(certain):
                parts = [accepted, [ended for ended in certain if not ended.result.is_acceptance]]
            for part in filter(None, parts):
                await self._record_or_split(part)

    async def _record_or_split(self, batch: list[EndedAttempt]) -> None:
        """Records a batch. Of a refused result, removes the provider's texts and tries again; then queues it for
        later."""
        aside: set[UUID] = set()
        _, culprits = await bisect_batch(batch, partial(self._record_with_retries, aside=aside))
        for ended, error in culprits:
            report_refused(ended.email.email_id, error.message)
            bare = ended.result.without_provider_texts()
            if bare != ended.result:
                await self._record_or_split([ended._replace(result=bare)])
                continue
            # The email counts as in flight until its result is committed. A drain does not wait for this email, because
            # recovery settles it when its lease expires.
            ended.email.on(EmailEvent.REFUSE)
            asyncio.get_running_loop().call_later(REFUSED_SECONDS, self.inbox.add, ended)

    async def _record_with_retries(self, part: Sequence[EndedAttempt], aside: set[UUID]) -> None:
        """Records results, except those of the emails in `aside`, and retries until PostgreSQL answers. Queues the
        results of locked rows for later, and adds their emails to `aside`. Raises StatementRefused."""
        batch, is_busy = [ended for ended in part if ended.email.email_id not in aside], False
        if not batch:
            return
        while True:
            try:
                if batch[0].email.state is EmailState.IN_DOUBT and await self.store.is_recorded(batch[0].result):
                    # Because the reply was lost, the worker does not know which leases it still has. Treat the lease of
                    # a deferred email as lost.
                    self._close(batch, (), 0.0)
                    break
                batch = await self._without_locked(batch, aside, is_busy=is_busy)
                if batch:
                    began_at, asked_at = time.perf_counter(), steady_clock()
                    ours = await self.store.record([ended.result for ended in batch])
                    report_record(batch, time.perf_counter() - began_at)
                    self._report_lost_leases(batch, ours)
                    self._close(batch, ours, asked_at)
                break
            except StoreBusy as error:
                # Nothing was committed, probably because one row is locked. Treat a second StoreBusy as an outage.
                if is_busy:
                    await self.outage.wait(error)
                is_busy = True
            except SchemaError as error:
                # A SchemaError here is probably raised by a trigger. Keep the result until it can be recorded.
                raise StatementRefused(error.message) from error
            except StoreUnavailable as error:
                for ended in batch:
                    ended.email.on(EmailEvent.LOSE_REPLY)
                await self.outage.wait(error)

    async def _without_locked(
        self, batch: list[EndedAttempt], aside: set[UUID], *, is_busy: bool
    ) -> list[EndedAttempt]:
        locked = await self.store.locked.find_locked([ended.email.email_id for ended in batch], is_busy=is_busy)
        if not locked:
            return batch
        aside |= locked
        for ended in batch:
            if ended.email.email_id in locked:
                self.inbox.add_later(ended, LOCKED_SECONDS)
        return [ended for ended in batch if ended.email.email_id not in locked]

    def _close(self, batch: list[EndedAttempt], ours: Collection[UUID], asked_at: float) -> None:
        """Finishes recorded emails. `ours`: those whose leases this worker still had. `asked_at`: by `steady_clock`."""
        self.outage.end()
        finished: list[Delivery] = []
        for email, result, retry_seconds in batch:
            email.on(EmailEvent.RECORD)
            if email.ledger_slot is not None:
                self.ledger.clear(email.ledger_slot)
                email.ledger_slot = None
            # Ack the message even if the email is retried: this worker keeps the lease, so it no longer needs the
            # message. An unacked message would take a place in the prefetch window.
            finished.append(email.delivery)
            if result.status is not Status.SENDING:
                email.on(EmailEvent.FINISH)
                self.sent_count += result.status is Status.SENT
                self.finished_count += 1
                del self.window.emails[email.lease.email_id]
            elif email.lease.email_id in ours:
                email.confirm(asked_at, result.lease_seconds or 0.0)
                self.deferred.retry(email, retry_seconds)
            else:
                self.deferred.release(email)
        self.broker.ack(finished)
        self.window.wake()

    def _report_lost_leases(self, batch: list[EndedAttempt], ours: set[UUID]) -> None:
        if len(ours) == len(batch):
            return
        for email, result, _ in batch:
            if email.email_id not in ours:
                metrics.LEASES_LOST.add(1)
                fields = {"email_id": str(email.email_id), "attempt": result.attempt_number, "outcome": result.outcome}
                get_log().error("email.lease_lost", **fields)

    async def finish(self) -> None:
        await self.inbox.finish()
