"""Settles the ledger of a dead worker. The relay on the same host does this within moments.

    answered       → the answer is recorded
    on the wire    → uncertain. If the provider has idempotency keys: pending, and pinned to this provider (see
                     `domain.decision`). Otherwise: held or resent, by the policy in the ledger
    being rendered → released, and a crash of this email is counted, because rendering may have killed the worker.
                     After three crashes, the email fails
    not in the ledger → released. If another host has recovered the email in the meantime, the recovery is undone: a
                     held email becomes pending again, unless it has changed since its recovery

If the host has rebooted since the ledger was created, the last writes to the ledger may be lost. Emails that are not in
the ledger are then left to `lost_host`.

The order matters. First, the relay ends the worker's database sessions, so the worker can commit nothing more. Then the
relay records results, unless the worker or an earlier settlement has recorded them. Then it releases leases. Last, it
deletes the file. If a settlement was interrupted, or had to skip emails, the relay repeats it.

If PostgreSQL cannot end a session (its process is stopped, or waits for a dead disk), only this ledger is delayed.
Until the session has ended, the worker counts as live. `frozen_worker` then settles the worker's leases as they expire.
The writes of `frozen_worker` are fenced against everything that the session may still commit.
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
    find_histories,
    find_leases,
    find_recovered,
    note_crashes,
    terminate_sessions,
)
from dispatcher.telemetry.log import get_log

MAX_CRASHES: Final = 3
"""An email fails after this number of workers died while they rendered it. Rendering takes a fraction of a millisecond,
so a harmless email hardly ever reaches this number."""
SESSIONS_GONE_SECONDS: Final = 1.0
"""How long the relay waits for PostgreSQL to end a dead worker's sessions. Normally, this takes milliseconds. If it
takes longer than this time, the relay settles the other ledgers first."""


class DeadWorkers:
    """Settles the ledgers of dead workers."""

    def __init__(self, settings: Settings, pool: Pool, report: Report) -> None:
        self._settlement = Settlement(settings, pool, report, reason="worker_died", fate="The worker died")
        self._pool = pool
        self._report = report
        self.delayed: set[Path] = set()  # the ledgers of dead workers that still have a database session
        self._log = get_log()

    async def settle(self, path: Path) -> bool:
        """Settles a ledger. Returns False if the ledger's worker is alive, or still has a database session.
        Idempotent."""
        try:
            with dead_ledger(path) as ledger:
                if ledger is not None:
                    await self._settle(ledger)
                self.delayed.discard(path)
                return ledger is not None
        except StoreBusy as error:
            if path not in self.delayed:
                self.delayed.add(path)
                self._log.error("ledger.delayed", file=path.name, reason=error.message)
            return False
        except StoreUnavailable:
            raise
        except DispatcherError as error:
            # PostgreSQL refuses this ledger's content. Report this and go on, so that the other ledgers need not wait.
            self._report(path, error.message)
            return True

    async def _settle(self, ledger: DeadLedger) -> None:
        await self._end_sessions(ledger)
        store = LeaseStore(self._pool, worker=ledger.worker, slot=ledger.slot)
        recorded, left = await self._record(ledger, store)
        released, is_all = 0, not left
        if ledger.is_complete:
            released, is_released = await self._release(ledger, left)
            is_all = await self._undo_recovery(ledger, store, left) and is_released
        if is_all:
            ledger.path.unlink(missing_ok=True)
        if is_all or recorded or released:
            self._settlement.log(ledger.worker, released, recorded)

    async def _end_sessions(self, ledger: DeadLedger) -> None:
        """Ends the worker's sessions, so that it can commit nothing more. Raises StoreBusy if one has not ended in
        time. Later calls for the same ledger check only once, without a wait."""
        give_up_at = time.monotonic() + (0.0 if ledger.path in self.delayed else SESSIONS_GONE_SECONDS)
        async with session(self._pool) as connection:
            while await terminate_sessions(connection, ledger.worker):
                if time.monotonic() >= give_up_at:
                    raise StoreBusy(f"PostgreSQL has not yet ended the sessions of the dead worker {ledger.worker}.")
                await asyncio.sleep(0.02)  # poll, because PostgreSQL does not report that a session has ended

    async def _record(self, ledger: DeadLedger, store: LeaseStore) -> tuple[list[Result], set[UUID]]:
        """Records the ledger's results. Returns them, and the emails that it skipped: locked or refused."""
        async with session(self._pool) as connection:
            histories = await find_histories(
                connection,
                [attempt.email_id for attempt in ledger.attempts],
                redeliver_seconds=self._settlement.redeliver_seconds,
            )
        results = [
            self._settlement.judge(attempt, *histories.get(attempt.email_id, (0, None, None)))
            for attempt in ledger.attempts
        ]
        # Leave out results that are already recorded: by the worker, or by an earlier settlement that was interrupted.
        missing = [result for result in results if not await store.is_recorded(result)]
        if not missing:
            return [], set()
        outcome = await self._settlement.record(store, ledger.path, missing)
        left = outcome.locked | outcome.refused.keys()
        return [result for result in missing if result.email_id not in left], left

    async def _release(self, ledger: DeadLedger, unrecorded: set[UUID]) -> tuple[int, bool]:
        """Releases the leases that have no result, but not those of `unrecorded` emails. Counts a crash for each email
        that was being rendered. Returns how many were released, and whether no lease is left."""
        suspects = {suspect.email_id: suspect.lease_token for suspect in ledger.suspects}
        async with session(self._pool) as connection:
            try:
                released = await self._count_crashes(connection, ledger.worker, suspects) if suspects else 0
            except StatementRefused:
                released, suspects = 0, {}  # count no crash; release the suspects like the other emails
            leases = await find_leases(connection, ledger.worker)
        # Do not release a suspect (an email that was being rendered) that is still leased. Another transaction has
        # locked its row, so a later settlement counts the crash.
        free = [lease for lease in leases if lease.email_id not in unrecorded | suspects.keys()]
        outcome = await self._settlement.release(ledger.path, free)
        is_all = len(free) == len(leases) and not (unrecorded or outcome.locked or outcome.refused)
        return released + sum(map(len, outcome.answers)), is_all

    async def _count_crashes(self, connection: AsyncSession, worker: str, suspects: Mapping[UUID, int]) -> int:
        """Counts a crash for each email that was being rendered; at `MAX_CRASHES`, it fails. Returns how many are
        pending again."""
        crashed = await note_crashes(connection, worker, suspects, MAX_CRASHES)
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

    async def _undo_recovery(self, ledger: DeadLedger, store: LeaseStore, unrecorded: set[UUID]) -> bool:
        """Makes emails pending again that another host has held although this worker had not sent them. False if one
        was skipped.

        An email that was on the wire stays held: by now, its recorded uncertain result confirms the recovery.
        """
        async with session(self._pool) as connection:
            rescued = await find_recovered(connection, ledger.worker)
        leases = {email_id: token for email_id, token in rescued.items() if email_id not in unrecorded}
        if not leases:
            return not rescued
        outcome = await self._settlement.locked.execute_unlocked(
            leases, lambda free: store.revert_recovery({i: leases[i] for i in free})
        )
        return sum(map(len, self._settlement.reported(ledger.path, outcome).answers)) == len(rescued)
