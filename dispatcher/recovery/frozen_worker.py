"""A worker lives and its leases expired: it is frozen, most likely (stopped, swapped out). The relay of its host acts.

    not named in its ledger → released: nothing of it left, and nothing will (see `host.ledger`)
    answered                → recorded as answered
    on the wire             → uncertain, by the ledger's policy, after a wait: a worker that wakes can still answer

A lease has expired where PostgreSQL says so and `unrenewed` agrees.

The relay asks PostgreSQL for the lease first, and fences every write afterwards by the lease's token and end: whatever
the worker commits in between, a renewal included, makes the write find nothing. The worker may wake at any point: its
own writes find the token gone, an acceptance still proves `sent`, and it begins nothing that it has not begun.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dispatcher.config import Settings
from dispatcher.errors import DispatcherError, StoreBusy
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger_reader import LivingLedger
from dispatcher.recovery.settlement import Report, Settlement
from dispatcher.recovery.unrenewed import Unrenewed
from dispatcher.store.connections import Pool, session
from dispatcher.store.leases import LeaseStore, Result
from dispatcher.store.settlement import FoundLease, find_expiring
from dispatcher.telemetry.log import get_log

LOOK_SECONDS: Final = 0.5
SEEN_SECONDS: Final = 0.01
"""Until every processor sees what we wrote, and we what it wrote before: a matter of nanoseconds."""
PATIENCE: Final = 3.0
"""A lease's length divided by this is what a worker is given beyond its end to come back with an answer: time for two
renewals."""


class FrozenWorkers:
    """Settles the expired leases of workers that live on this host."""

    def __init__(
        self, settings: Settings, pool: Pool, report: Report, clock: Callable[[], float] = steady_clock
    ) -> None:
        self._settlement = Settlement(settings, pool, report, reason="worker_frozen", fate="The worker was frozen")
        self._unrenewed = Unrenewed(settings.lease_seconds, clock)
        self._patience_seconds = settings.lease_seconds / PATIENCE
        self._pool = pool
        self._report = report
        self._look_at = 0.0

    async def settle_when_due(self, ledgers: Sequence[LivingLedger]) -> None:
        """As `settle`, if it is time for a look."""
        if ledgers and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            await self.settle(ledgers)

    async def settle(self, ledgers: Iterable[LivingLedger]) -> None:
        """One look at these workers' leases.

        Raises:
            StoreUnavailable: try again later.
        """
        by_worker = {ledger.worker: ledger for ledger in ledgers}
        async with session(self._pool) as connection:
            found = await find_expiring(connection, by_worker, within_seconds=self._unrenewed.within_seconds)
        self._unrenewed.look(found)
        expired = [lease for lease in found if self._unrenewed.has_expired(lease)]
        for worker in {lease.worker for lease in expired}:
            ledger = by_worker[worker]
            try:
                await self._settle(ledger, [lease for lease in expired if lease.worker == worker])
            except StoreBusy as error:  # the leases of other workers do not wait for it; the next look tries again
                get_log().error("ledger.delayed", file=ledger.path.name, reason=error.message)

    async def _settle(self, ledger: LivingLedger, expired: Sequence[FoundLease]) -> None:
        try:
            ledger.void_leases(steady_clock())
            await asyncio.sleep(SEEN_SECONDS)
            flights = {(flight.email_id, flight.lease_token): flight for flight in ledger.flights()}
        except DispatcherError as error:
            self._report(ledger.path, error.message)
            return
        unnamed: list[FoundLease] = []
        results: list[Result] = []
        for lease in expired:
            flight = flights.get((lease.email_id, lease.token))
            if flight is None:
                unnamed.append(lease)
            elif flight.outcome or self._unrenewed.has_expired(lease, patience_seconds=self._patience_seconds):
                result = self._settlement.judge(flight, lease.attempt_base)
                results.append(result._replace(expired_at=lease.expired_at))
        released = await self._settlement.release(ledger.path, unnamed)
        # Under another name: the worker may record the same attempts when it wakes, and count them as its own.
        name = f"{ledger.slot}:relay"
        recorded = await self._settlement.record(LeaseStore(self._pool, worker=name, slot=name), ledger.path, results)
        ids = set().union(*recorded.answers)
        count = sum(map(len, released.answers))
        if count or ids:
            self._settlement.log(ledger.worker, count, [result for result in results if result.email_id in ids])
