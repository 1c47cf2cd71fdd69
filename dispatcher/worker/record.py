"""The record stage: outcomes → committed → acked, in batches, whatever happens to the database meanwhile.

outcome ─▶ record (batched) ─▶ committed: the ledger slot is cleared, the message acked
             │ locked: later                └ a deferral: back to the send stage; without its lease: given back
             │ reply lost: looks whether it is on record, before anything else
             └ refused: split, until the culprit is alone; it loses its words, or waits
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Final
from uuid import UUID

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.domain.status import Status
from dispatcher.errors import SchemaError, StatementRefused, StoreBusy, StoreUnavailable
from dispatcher.host.batches import Batches
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.store.apart import apart
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.worker.in_flight_email import Ended, Event, State
from dispatcher.worker.outage import LOCKED_SECONDS, StoreOutage
from dispatcher.worker.report import report_record
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

REFUSED_SECONDS: Final = 2.0
"""Until a result is tried again that PostgreSQL refuses even without its words."""
FULL_SHARE: Final = 2
"""One part of so many of the window is worth a statement: while it is recorded, the others are on their way."""


class RecordStage:
    """Keeps every result until a commit holds it; nothing is acked before.

    Attributes:
        finished_count: Emails whose lease a commit of this stage has ended.
        sent_count: Those of them that were sent.
    """

    def __init__(
        self,
        store: LeaseStore,
        broker: Consumer,
        outage: StoreOutage,
        ledger: Ledger,
        window: Window,
        *,
        inbox: Batches[Ended],
        deferred: SendStage,
    ) -> None:
        """
        Args:
            deferred: Outbox: what is to be tried again, or given back.
        """
        self._store = store
        self._broker = broker
        self._outage = outage
        self._ledger = ledger
        self._window = window
        self._inbox = inbox
        self._deferred = deferred
        self._log = get_log()
        self.sent_count = 0
        self.finished_count = 0

    async def run(self, prefetch: int) -> None:
        """Records until cancelled."""
        await self._inbox.run(self._record, full=prefetch // FULL_SHARE, is_awaited=self._window.is_scarce)

    async def _record(self, batch: list[Ended]) -> None:
        with self._outage.committing:
            for ended in batch:
                if ended.email.state is State.IN_DOUBT:
                    await self._record_apart([ended])
            if certain := [ended for ended in batch if ended.email.state in (State.ANSWERED, State.REFUSED)]:
                await self._record_apart(certain)

    async def _record_apart(self, batch: list[Ended]) -> None:
        """Records all that PostgreSQL can record; a culprit loses its words, or waits."""
        _, culprits = await apart(batch, self._record_surely)
        for ended, error in culprits:
            self._log.error("email.statement_failed", email_id=str(ended.email.email_id), reason=error.message)
            bare = ended.result.bare()
            if bare != ended.result:
                await self._record_apart([ended._replace(result=bare)])
                continue
            # Until the rescue has judged it, or PostgreSQL takes the result after all, the email stays in the window.
            # A drain does not wait for that.
            ended.email.on(Event.REFUSE)
            asyncio.get_running_loop().call_later(REFUSED_SECONDS, self._inbox.add, ended)

    async def _record_surely(self, part: Sequence[Ended]) -> None:
        """Records what is not locked, however long PostgreSQL is away; the rest is added again, later.

        Raises:
            StatementRefused: PostgreSQL cannot record all of it in one statement; nothing of it is recorded.
        """
        batch, is_busy = list(part), False
        while True:
            try:
                if batch[0].email.state is State.IN_DOUBT and await self._store.is_recorded(batch[0].result):
                    # The reply would have said whose lease was lost. Where one is needed again, it counts as lost.
                    self._close(batch, (), 0.0)
                    break
                batch = await self._without_locked(batch, is_busy=is_busy)
                if batch:
                    await self._commit(batch)
                break
            except StoreBusy as error:
                # Nothing was committed, perhaps for one email alone. If not, it is as if PostgreSQL were away.
                if is_busy:
                    await self._outage.wait(error)
                is_busy = True
            except SchemaError as error:
                # A trigger's, most likely. What was sent must be kept until it can be recorded.
                raise StatementRefused(error.message) from error
            except StoreUnavailable as error:
                for ended in batch:
                    ended.email.on(Event.LOSE_REPLY)
                await self._outage.wait(error)

    async def _without_locked(self, batch: list[Ended], *, is_busy: bool) -> list[Ended]:
        """Leaves the emails for later that another transaction has locked."""
        locked = await self._store.locked.among([ended.email.email_id for ended in batch], is_busy=is_busy)
        if not locked:
            return batch
        for ended in batch:
            if ended.email.email_id in locked:
                self._inbox.add_later(ended, LOCKED_SECONDS)
        return [ended for ended in batch if ended.email.email_id not in locked]

    async def _commit(self, batch: list[Ended]) -> None:
        began_at, asked_at = time.perf_counter(), steady_clock()
        ours = await self._store.record([ended.result for ended in batch])
        report_record(batch, time.perf_counter() - began_at)
        self._report_lost_leases(batch, ours)
        self._close(batch, ours, asked_at)

    def _close(self, batch: list[Ended], ours: Collection[UUID], asked_at: float) -> None:
        """Ends what a commit has recorded: clears the ledger, acks, and passes deferrals on.

        Args:
            ours: The emails of which we know that their lease goes on, if the result says so.
            asked_at: When the statement was sent, by `steady_clock`.
        """
        self._outage.over()
        finished: list[Delivery] = []
        for email, result, retry_seconds in batch:
            email.on(Event.RECORD)
            if email.ledger_slot is not None:
                self._ledger.clear(email.ledger_slot)
                email.ledger_slot = None
            # Acked even where it is to be tried again: the row is ours, and no slot of the window waits with it.
            finished.append(email.delivery)
            if result.status is not Status.SENDING:
                email.on(Event.FINISH)
                self.sent_count += result.status is Status.SENT
                self.finished_count += 1
                del self._window.emails[email.lease.email_id]
            elif email.lease.email_id in ours:
                email.confirm(asked_at, result.lease_seconds or 0.0)
                self._deferred.retry(email, retry_seconds)
            else:
                self._deferred.give_back(email)
        self._broker.ack(finished)
        self._window.wake()

    def _report_lost_leases(self, batch: list[Ended], ours: set[UUID]) -> None:
        if len(ours) == len(batch):
            return
        for email, result, _ in batch:
            if email.email_id not in ours:
                metrics.LEASES_LOST.add(1)
                self._log.error(
                    "email.lease_lost",
                    email_id=str(email.email_id),
                    attempt=result.attempt_number,
                    outcome=result.outcome,
                )

    async def finish(self) -> None:
        """Returns once everything queued is committed."""
        await self._inbox.finish()
