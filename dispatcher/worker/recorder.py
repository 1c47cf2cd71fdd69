"""Results into the database, in batches, whatever happens to the database meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.domain.values import value
from dispatcher.errors import SchemaError, StatementRefused, StoreBusy, StoreUnavailable
from dispatcher.host.batches import Batches
from dispatcher.store.apart import apart
from dispatcher.store.leases import LeaseStore, Result
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.worker.measuring import measure_record
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.sending import Sending

LOCKED_SECONDS: Final = 0.5
"""Until the next look at an email that somebody has locked."""
REFUSED_SECONDS: Final = 2.0
"""Until a result is tried again that PostgreSQL refuses even without its words."""


@value
class Closing:
    """A result and the email that it is about.

    Attributes:
        is_doubtful: A statement that held it may have been committed, or may yet be.
    """

    sending: Sending
    result: Result
    is_doubtful: bool = False


class Recorder:
    """Keeps every result until a commit holds it; nothing is acked before."""

    def __init__(
        self,
        store: LeaseStore,
        outage: StoreOutage,
        on_recorded: Callable[[list[Closing]], None],
        *,
        full: int,
        is_awaited: Callable[[], bool],
    ) -> None:
        """
        Args:
            full: How many results make a full batch.
            on_recorded: Is told of each batch that was committed.
            is_awaited: Whether emails wait for the room that a commit makes.
        """
        self._store = store
        self._outage = outage
        self._on_recorded = on_recorded
        self._log = get_log()
        self._batches = Batches(self._record, full=full, is_awaited=is_awaited)

    def add(self, closing: Closing) -> None:
        """Queues a result."""
        self._batches.add(closing)

    async def run(self) -> None:
        """Records until cancelled."""
        await self._batches.run()

    async def finish(self) -> None:
        """Returns once everything queued is committed."""
        await self._batches.finish()

    async def _record(self, batch: list[Closing]) -> None:
        with self._outage.committing:
            for closing in batch:
                if closing.is_doubtful:
                    await self._record_apart([closing], answer_lost=True)
            if certain := [closing for closing in batch if not closing.is_doubtful]:
                await self._record_apart(certain)

    async def _record_surely(self, part: Sequence[Closing], *, answer_lost: bool = False) -> None:
        """Records what is not locked, however long PostgreSQL is away; the rest is added again, later.

        Raises:
            StatementRefused: PostgreSQL cannot record all of it in one statement; nothing of it is recorded.
        """
        batch, is_busy = list(part), False
        while batch:
            try:
                if answer_lost and await self._store.is_recorded(batch[0].result):
                    self._doubt_leases(batch)
                    break
                email_ids = [closing.sending.email_id for closing in batch]
                if locked := await self._store.locked.among(email_ids, is_busy=is_busy):
                    batch = self._without_locked(batch, locked, is_doubtful=answer_lost)
                    continue
                began_at = time.perf_counter()
                ours = await self._store.record([closing.result for closing in batch])
                measure_record(batch, time.perf_counter() - began_at)
                self._note_lost_leases(batch, ours)
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
                answer_lost = True
                await self._outage.wait(error)
        if batch:
            self._outage.over()
            self._on_recorded(batch)

    def _without_locked(self, batch: list[Closing], locked: set[UUID], *, is_doubtful: bool) -> list[Closing]:
        for closing in batch:
            if closing.sending.email_id in locked:
                self._batches.add_later(replace(closing, is_doubtful=is_doubtful), LOCKED_SECONDS)
        return [closing for closing in batch if closing.sending.email_id not in locked]

    async def _record_apart(self, batch: list[Closing], *, answer_lost: bool = False) -> None:
        """Records all that PostgreSQL can record; a culprit loses its words, or waits."""
        _, culprits = await apart(batch, lambda part: self._record_surely(part, answer_lost=answer_lost))
        for closing, error in culprits:
            self._log.error("email.refused", email_id=str(closing.sending.email_id), reason=error.message)
            bare = closing.result.bare()
            if bare != closing.result:
                await self._record([Closing(closing.sending, bare)])
            else:
                # The lease is not renewed any more: the rescue judges the email when it ends. Until it has, or
                # PostgreSQL takes the result after all, the email has its place here. A drain does not wait for that.
                closing.sending.lease_lost = True
                asyncio.get_running_loop().call_later(REFUSED_SECONDS, self._batches.add, closing)

    def _doubt_leases(self, batch: list[Closing]) -> None:
        """The answer would have said whose lease was lost: what was to go on under its lease is given back instead."""
        for closing in batch:
            closing.sending.lease_lost |= closing.result.status is Status.SENDING

    def _note_lost_leases(self, batch: list[Closing], ours: set[UUID]) -> None:
        for closing in batch:
            if closing.sending.email_id not in ours:
                closing.sending.lease_lost = True
                metrics.LEASES_LOST.add(1)
                self._log.error(
                    "email.lease_lost",
                    email_id=str(closing.sending.email_id),
                    attempt=closing.result.attempt_number,
                    outcome=closing.result.outcome,
                )
