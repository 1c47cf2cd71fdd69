"""Settles the expired leases of a frozen worker (stopped, swapped out). The relay on the same host does this.

    not in the ledger → released: the worker has not sent the email, and will not send it under this lease (see
                        `host.ledger`)
    answered          → the answer is recorded
    on the wire       → after a wait, uncertain: held or resent, by the policy in the ledger. During the wait, the
                        worker may continue and record the answer

A lease counts as expired only if it has expired by PostgreSQL's clock and by the monotonic clock (see `unrenewed`).

The relay first reads the lease from PostgreSQL, and fences every later write by the lease's token and end. If the
worker commits anything in between, even a renewal, the relay's write finds no row. The worker may continue at any time.
It then sends no further email under the expired leases, and its writes find a different token. But if the worker
records that a provider accepted an email, the email still becomes `sent`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dispatcher.config import Settings
from dispatcher.domain.retry import MAX_RECOVERY_INTERVAL_SECONDS
from dispatcher.errors import DispatcherError, StoreBusy
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger_reader import LivingLedger
from dispatcher.recovery.settlement import Report, Settlement
from dispatcher.recovery.unrenewed import UnrenewedLeases
from dispatcher.store.connections import Pool, session
from dispatcher.store.leases import LeaseStore, Result
from dispatcher.store.settlement import FoundLease, find_expiring
from dispatcher.telemetry.log import get_log

POLL_SECONDS: Final = 2.0
"""How often the relay looks for leases that expire; more often if leases are shorter than eight times this. The relay
must settle an expired lease within the grace period after which another host may recover the email (see
`domain.retry`)."""
EARLY_SECONDS: Final = 0.1
"""A search may begin this much before it is due. The relay looks at the ledgers once per second, so a search that is
due a few milliseconds later would be a second late."""
POLL_SHARE: Final = 1 / 20
"""The relay spends about this share of its time on the search. While an old transaction is open, the search takes
longer and longer, because PostgreSQL reads the index entries of all leases since."""
VISIBLE_SECONDS: Final = 0.01
"""The wait after the relay has ended leases by writing `voided_at` to the ledger. After this wait, the worker sees
`voided_at`, and the relay sees all earlier writes of the worker. Nanoseconds would suffice."""
GRACE_SHARE: Final = 3.0
"""If an email is on the wire, the worker has additional time to record the answer: a third (1 / GRACE_SHARE) of a
lease's length. This is enough for two renewals."""


class FrozenWorkers:
    """Settles the expired leases of live workers on this host."""

    def __init__(
        self, settings: Settings, pool: Pool, report: Report, clock: Callable[[], float] = steady_clock
    ) -> None:
        self._settlement = Settlement(settings, pool, report, reason="worker_frozen", fate="The worker was frozen")
        self._unrenewed = UnrenewedLeases(settings.lease_seconds, clock)
        self._grace_seconds = settings.lease_seconds / GRACE_SHARE
        self._pool = pool
        self._report = report
        self._poll_seconds = min(POLL_SECONDS, settings.lease_seconds / 8)
        self._next_poll_at = 0.0

    async def settle_when_due(self, ledgers: Sequence[LivingLedger]) -> None:
        """Calls `settle`, but only at the interval of the search."""
        began_at = time.monotonic()
        if ledgers and began_at >= self._next_poll_at - EARLY_SECONDS:
            self._next_poll_at = began_at + self._poll_seconds
            await self.settle(ledgers)
            seconds = max(self._poll_seconds, (time.monotonic() - began_at) / POLL_SHARE)
            self._next_poll_at = began_at + min(seconds, MAX_RECOVERY_INTERVAL_SECONDS)

    async def settle(self, ledgers: Iterable[LivingLedger]) -> None:
        """Settles the expired leases of the workers that own these ledgers."""
        by_worker = {ledger.worker: ledger for ledger in ledgers}
        async with session(self._pool) as connection:
            found = await find_expiring(
                connection,
                by_worker,
                within_seconds=self._unrenewed.within_seconds,
                redeliver_seconds=self._settlement.redeliver_seconds,
            )
        self._unrenewed.observe(found)
        expired = [lease for lease in found if self._unrenewed.has_expired(lease)]
        for worker in {lease.worker for lease in expired}:
            ledger = by_worker[worker]
            try:
                await self._settle(ledger, [lease for lease in expired if lease.worker == worker])
            except StoreBusy as error:  # go on with the other workers; the next round tries this worker again
                get_log().error("ledger.delayed", file=ledger.path.name, reason=error.message)

    async def _settle(self, ledger: LivingLedger, expired: Sequence[FoundLease]) -> None:
        try:
            ledger.void_leases(steady_clock())
            await asyncio.sleep(VISIBLE_SECONDS)
            attempts = {(attempt.email_id, attempt.lease_token): attempt for attempt in ledger.attempts()}
        except DispatcherError as error:
            self._report(ledger.path, error.message)
            return
        unnamed: list[FoundLease] = []
        results: list[Result] = []
        for lease in expired:
            attempt = attempts.get((lease.email_id, lease.token))
            if attempt is None:
                unnamed.append(lease)
            elif attempt.outcome or self._unrenewed.has_expired(lease, grace_seconds=self._grace_seconds):
                result = self._settlement.judge(attempt, lease.attempt_base, lease.pinned_seconds, lease.limits)
                results.append(result._replace(expired_at=lease.expired_at))
        released = await self._settlement.release(ledger.path, unnamed)
        # Use another name than the worker's: the worker may continue, and record and count the same attempts under its
        # own name.
        name = f"{ledger.slot}:relay"
        recorded = await self._settlement.record(LeaseStore(self._pool, worker=name, slot=name), ledger.path, results)
        ids = set().union(*recorded.answers)
        count = sum(map(len, released.answers))
        if count or ids:
            self._settlement.log(ledger.worker, count, [result for result in results if result.email_id in ids])
