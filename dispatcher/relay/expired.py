"""Leases that ran out although their worker lives on this host: it was frozen, most likely (stopped, swapped out).

    not named in its ledger → released: nothing of it left, and nothing will (see `host.ledger`)
    answered                → recorded as answered
    on the wire             → uncertain, by the ledger's policy, after a wait: a worker that wakes can still tell

A lease has run out where PostgreSQL says so and `unrenewed` agrees.

What the database says of the lease is asked first, and fences every write afterwards by token and end: whatever the
worker commits in between, a renewal included, makes ours find nothing. It may wake at any point: its own writes find
the token gone, an acceptance still proves `sent`, and what it has not begun it does not begin.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.domain.decision import decide
from dispatcher.domain.outcome import Uncertain
from dispatcher.domain.retry import RetryPolicy
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError, StatementRefused, StoreBusy
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger_format import Flight
from dispatcher.host.ledger_reader import LivingLedger
from dispatcher.relay.unrenewed import Unrenewed
from dispatcher.store.connections import Pool, session
from dispatcher.store.leases import LeaseStore, Result
from dispatcher.store.locked import RETRY_REFUSED_SECONDS, Around, LockedRows
from dispatcher.store.results import result_of
from dispatcher.store.settlement import ExpiringLease, find_expiring, release_expired
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

LOOK_SECONDS: Final = 0.5
SEEN_SECONDS: Final = 0.01
"""Until every processor sees what we wrote, and we what it wrote before: a matter of nanoseconds."""
PATIENCE: Final = 3.0
"""A lease's length divided by this is what a worker is given beyond its end to come back with an answer: time for two
renewals."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A lease that ran out, and what its worker's ledger says of it."""

    lease: ExpiringLease
    flight: Flight | None


class ExpiredLeases:
    """Settles the expired leases of workers that live on this host."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        report: Callable[[LivingLedger, str], None],
        clock: Callable[[], float] = steady_clock,
    ) -> None:
        """
        Args:
            report: Takes a ledger that we cannot use any more, and why.
        """
        self._unrenewed = Unrenewed(settings.lease_seconds, clock)
        self._patience_seconds = settings.lease_seconds / PATIENCE
        self._policy = RetryPolicy(settings.max_attempts, settings.retry_base_seconds, settings.retry_cap_seconds)
        self._pool = pool
        self._locked = LockedRows(lambda: session(pool), retry_seconds=RETRY_REFUSED_SECONDS)
        self._report = report
        self._log = get_log()
        self._look_at = 0.0

    async def settle_when_due(self, ledgers: Sequence[LivingLedger]) -> None:
        """As `settle`, if it is time for a look."""
        if ledgers and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            await self.settle(ledgers)

    async def settle(self, ledgers: Iterable[LivingLedger]) -> None:
        """One look.

        Raises:
            StoreUnavailable: try again later.
        """
        by_worker = {ledger.worker: ledger for ledger in ledgers}
        async with session(self._pool) as connection:
            found = await find_expiring(connection, by_worker, within_seconds=self._unrenewed.within_seconds)
        self._unrenewed.look(found)
        expired = [lease for lease in found if self._unrenewed.has_expired(lease)]
        for worker in {lease.worker for lease in expired}:
            try:
                await self._settle(by_worker[worker], [lease for lease in expired if lease.worker == worker])
            except StoreBusy as error:  # the leases of other workers do not wait for it; the next look tries again
                self._log.error("ledger.delayed", file=by_worker[worker].path.name, reason=error.message)

    async def _settle(self, ledger: LivingLedger, expired: Sequence[ExpiringLease]) -> None:
        try:
            ledger.void_leases(steady_clock())
            await asyncio.sleep(SEEN_SECONDS)
            flights = {(flight.email_id, flight.lease_token): flight for flight in ledger.flights()}
        except DispatcherError as error:
            self._report(ledger, error.message)
            return
        found = [_Found(lease, flights.get((lease.email_id, lease.token))) for lease in expired]
        released = await self._release([each.lease for each in found if each.flight is None])
        results = [self._result(each.lease, each.flight) for each in found if each.flight and self._is_due(each)]
        recorded = await self._record(ledger, results)
        if released or recorded:
            uncertain = sum(result.outcome == "uncertain" for result in recorded)
            metrics.RESCUED.add(released, "worker_frozen")
            metrics.HELD.add(sum(result.status is Status.HELD for result in recorded), "worker_frozen")
            self._log.warning(
                "ledger.settled",
                worker=ledger.worker,
                reason="worker_frozen",
                released=released,
                recorded=len(recorded) - uncertain,
                uncertain=uncertain,
            )

    def _is_due(self, found: _Found) -> bool:
        assert found.flight is not None
        if found.flight.outcome is not None:
            return True
        return self._unrenewed.has_expired(found.lease, patience_seconds=self._patience_seconds)

    async def _release(self, leases: Sequence[ExpiringLease]) -> int:
        async def release(free: set[UUID]) -> set[UUID]:
            async with session(self._pool) as connection:
                return await release_expired(connection, [lease for lease in leases if lease.email_id in free])

        if not leases:
            return 0
        around = await self._locked.around([lease.email_id for lease in leases], release)
        return sum(map(len, around.answers))

    async def _record(self, ledger: LivingLedger, results: Sequence[Result]) -> list[Result]:
        """Records in our name: the worker may record the same attempts when it wakes, and count them as its own.

        What is locked is found again at the next look, and so is what PostgreSQL refuses.
        """
        if not results:
            return []
        name = f"{ledger.slot}:relay"
        around = await record_free(LeaseStore(self._pool, worker=name, slot=name), self._locked, results)
        for error in around.refused.values():
            self._report(ledger, error.message)
        recorded = set().union(*around.answers)
        return [result for result in results if result.email_id in recorded]

    def _result(self, lease: ExpiringLease, flight: Flight) -> Result:
        outcome = flight.outcome or Uncertain("The worker was frozen while the email was on the wire.")
        number = flight.attempt_number - lease.attempt_base
        decision = decide(outcome, number, flight.policy, self._policy, random.random)
        return result_of(flight, outcome, decision)._replace(expired_at=lease.expired_at)


async def record_free(store: LeaseStore, rows: LockedRows, results: Sequence[Result]) -> Around[set[UUID]]:
    """Records what is neither locked nor refused by PostgreSQL; one that is refused is tried again without its words.

    The answers are the ids whose lease still held.
    """
    by_id = {result.email_id: result for result in results}

    async def record(free: set[UUID]) -> set[UUID]:
        try:
            return await store.record([by_id[email_id] for email_id in free])
        except StatementRefused:
            if len(free) > 1:
                raise
            return await store.record([by_id[email_id].bare() for email_id in free])

    return await rows.around(by_id, record)
