"""A worker died: the relay of its host settles the ledger that it left, within moments.

    answered       → recorded as answered
    on the wire    → uncertain, by the policy that the ledger holds
    being rendered → released, with a mark: the worker may have died of it. At three marks it is failed
    not named      → released. A lease that another host's rescue took away meanwhile is given back, too: a held email
                     that has not changed since is pending again
    the host went down since → what the ledger does not name is left to the rescue: the last writes may never have
                     reached the disk

The order counts: first the worker's sessions end, so that nothing of it can commit any more; then the results, except
for what the worker or an earlier settlement has recorded; then the releases; last the file goes. A settlement that
dies half-way is done again, and so is one that had to leave out emails.

A session that PostgreSQL cannot end (its process is stopped, or waits for a dead disk) delays the ledger of its own
worker alone. Until the session is gone that worker counts as living: `frozen_worker` settles its leases as they
expire, fenced against whatever the session may still commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError, StatementRefused, StoreBusy, StoreUnavailable
from dispatcher.host.ledger_reader import DeadLedger, dead_ledger
from dispatcher.recovery.settlement import Report, Settlement
from dispatcher.store.connections import AsyncSession, Pool, session
from dispatcher.store.leases import LeaseStore, Result
from dispatcher.store.settlement import (
    find_attempt_bases,
    find_leases,
    find_rescued,
    note_crashes,
    terminate_sessions,
)
from dispatcher.telemetry.log import get_log

MOST_CRASHES: Final = 3
"""An email that so many workers died of is failed. One that merely was being rendered when somebody killed its worker
is hardly ever so again: that takes a fraction of a millisecond."""
SESSIONS_GONE_SECONDS: Final = 1.0
"""PostgreSQL ends a session within milliseconds. After this, the other ledgers go first."""


class DeadWorkers:
    """Settles the ledgers of dead workers."""

    def __init__(self, settings: Settings, pool: Pool, report: Report) -> None:
        self._settlement = Settlement(settings, pool, report, reason="worker_died", fate="The worker died")
        self._pool = pool
        self._report = report
        self._delayed: set[Path] = set()
        self._log = get_log()

    async def settle(self, path: Path) -> bool:
        """Settles a ledger; returns False while its worker, or a session of the worker, lives.

        Raises:
            StoreUnavailable: PostgreSQL is away; call it again later.
        """
        try:
            with dead_ledger(path) as ledger:
                if ledger is not None:
                    await self._settle(ledger)
                self._delayed.discard(path)
                return ledger is not None
        except StoreBusy as error:
            if path not in self._delayed:
                self._delayed.add(path)
                self._log.error("ledger.delayed", file=path.name, reason=error.message)
            return False
        except StoreUnavailable:
            raise
        except DispatcherError as error:
            # PostgreSQL refuses what it says: the others must not wait for it.
            self._report(path, error.message)
            return True

    async def _settle(self, ledger: DeadLedger) -> None:
        await self._end_sessions(ledger)
        store = LeaseStore(self._pool, worker=ledger.worker, slot=ledger.slot)
        recorded, left = await self._record(ledger, store)
        released, is_all = 0, not left
        if ledger.names_all:
            released, is_released = await self._release(ledger, left)
            is_all = await self._undo_rescues(ledger, store, left) and is_released
        if is_all:
            ledger.path.unlink(missing_ok=True)
        if is_all or recorded or released:
            self._settlement.log(ledger.worker, released, recorded)

    async def _end_sessions(self, ledger: DeadLedger) -> None:
        """Returns once nothing of the worker can commit any more.

        Raises:
            StoreBusy: a session does not end. A later look only checks, and does not wait.
        """
        give_up_at = time.monotonic() + (0.0 if ledger.path in self._delayed else SESSIONS_GONE_SECONDS)
        async with session(self._pool) as connection:
            while await terminate_sessions(connection, ledger.worker):
                if time.monotonic() >= give_up_at:
                    raise StoreBusy(f"PostgreSQL does not end the sessions of the dead worker {ledger.worker}.")
                await asyncio.sleep(0.02)  # PostgreSQL announces no session's end

    async def _record(self, ledger: DeadLedger, store: LeaseStore) -> tuple[list[Result], set[UUID]]:
        """Records what the ledger names; returns the results, and the ids of those that it had to leave out."""
        async with session(self._pool) as connection:
            bases = await find_attempt_bases(connection, [flight.email_id for flight in ledger.flights])
        results = [self._settlement.judge(flight, bases.get(flight.email_id, 0)) for flight in ledger.flights]
        # The worker, or an earlier settlement, may have recorded some of them and died before it could say so.
        missing = [result for result in results if not await store.is_recorded(result)]
        if not missing:
            return [], set()
        around = await self._settlement.record(store, ledger.path, missing)
        left = around.locked | around.refused.keys()
        return [result for result in missing if result.email_id not in left], left

    async def _release(self, ledger: DeadLedger, unrecorded: set[UUID]) -> tuple[int, bool]:
        """Gives back what has no result to be recorded; returns how many, and whether that is all."""
        suspects = {suspect.email_id: suspect.lease_token for suspect in ledger.suspects}
        async with session(self._pool) as connection:
            try:
                released = await self._blame(connection, ledger.worker, suspects) if suspects else 0
            except StatementRefused:
                released, suspects = 0, {}  # they are released as the others are
            leases = await find_leases(connection, ledger.worker)
        # A suspect that is still leased is locked by another transaction: a later look blames it.
        free = [lease for lease in leases if lease.email_id not in unrecorded | suspects.keys()]
        around = await self._settlement.release(ledger.path, free)
        is_all = len(free) == len(leases) and not (unrecorded or around.locked or around.refused)
        return released + sum(map(len, around.answers)), is_all

    async def _blame(self, connection: AsyncSession, worker: str, suspects: Mapping[UUID, int]) -> int:
        """Gives back what the worker was rendering, one crash more; returns how many."""
        crashed = await note_crashes(connection, worker, suspects, MOST_CRASHES)
        for email in crashed:
            self._log.warning(
                "email.recovered",
                email_id=str(email.email_id),
                correlation_id=email.correlation_id,
                status=email.status.value,
                crashes=email.crash_count,
                reason=Reason.WORKER_CRASHED.value,
            )
        return sum(email.status is Status.PENDING for email in crashed)

    async def _undo_rescues(self, ledger: DeadLedger, store: LeaseStore, unrecorded: set[UUID]) -> bool:
        """Undoes rescues of what had not left: an uncertain result has confirmed its rescue as it was recorded.

        Returns:
            Whether that was all.
        """
        async with session(self._pool) as connection:
            rescued = await find_rescued(connection, ledger.worker)
        leases = {email_id: token for email_id, token in rescued.items() if email_id not in unrecorded}
        if not leases:
            return not rescued
        around = await self._settlement.locked.around(leases, lambda free: store.recover({i: leases[i] for i in free}))
        return sum(map(len, self._settlement.reported(ledger.path, around).answers)) == len(rescued)
