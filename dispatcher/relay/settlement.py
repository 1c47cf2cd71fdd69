"""Dead workers' in-flight ledgers: what they say is recorded, what they do not name is given back.

    answered      → recorded as answered
    on the wire   → uncertain, by the policy that the ledger holds
    being rendered → released, with a mark: it may be what the worker died of. At three marks it is failed
    not named     → released: nothing of it left; but left to the rescue where the host went down since, because what
                    was written last may never have reached the disk. The same where the rescue of another host has
                    come first: held emails that have not changed since are pending again

The order counts: first the sessions, so that nothing of the worker can commit any more; then the results, except for
what the worker or an earlier settlement has recorded; then what is left. A ledger is settled by the relay of its host
as soon as its lock is free, that is within moments of the worker's death, and its file goes last: a settlement that
dies half-way is done again. So is one that found emails locked by somebody else: what it could not judge, it left.

A session that PostgreSQL cannot end (its process is stopped, or waits for a dead disk) delays the ledger of its own
worker alone. Until the session is gone that worker is treated as a living one: `expired` settles its leases as they run
out, fenced against whatever the session may still commit.

Living workers whose leases ran out are settled in `expired`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.domain.decision import decide
from dispatcher.domain.outcome import Reason, Uncertain
from dispatcher.domain.retry import RetryPolicy
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError, StatementRefused, StoreBusy, StoreUnavailable
from dispatcher.host.ledger_format import SUFFIX, Flight, LedgerUnreadable
from dispatcher.host.ledger_reader import DeadLedger, LivingLedger, dead_ledger, living_ledger
from dispatcher.relay.expired import ExpiredLeases, record_free
from dispatcher.store.connections import AsyncSession, Pool, session
from dispatcher.store.leases import LeaseStore, Result
from dispatcher.store.locked import RETRY_REFUSED_SECONDS, LockedRows
from dispatcher.store.results import result_of
from dispatcher.store.server import find_database_id
from dispatcher.store.settlement import (
    find_attempt_bases,
    find_leases_of,
    find_rescued,
    has_leases,
    note_crashes,
    release_dead,
    terminate_sessions,
)
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

LOOK_SECONDS: Final = 0.2
MOST_CRASHES: Final = 3
"""An email that so many workers died of is failed. One that merely was being rendered when somebody killed its worker
is hardly ever so again: that takes a fraction of a millisecond."""
SESSIONS_GONE_SECONDS: Final = 1.0
"""PostgreSQL ends a session within milliseconds. After this, the other ledgers go first."""


class Settlement:
    """Settles what is left in one host's run directory."""

    def __init__(self, settings: Settings, pool: Pool) -> None:
        self._folder = settings.run_dir
        self._policy = RetryPolicy(settings.max_attempts, settings.retry_base_seconds, settings.retry_cap_seconds)
        self._pool = pool
        self._log = get_log()
        self._database_id: UUID | None = None
        self._reported: set[Path] = set()
        self._delayed: set[Path] = set()
        self._workers_here: frozenset[str] | None = None
        self._locked = LockedRows(lambda: session(pool), retry_seconds=RETRY_REFUSED_SECONDS)
        self._expired = ExpiredLeases(settings, pool, lambda ledger, reason: self._report(ledger.path, reason))

    @property
    def workers_here(self) -> Collection[str] | None:
        """Whose leases are settled here and by nobody else; None before the first look is over."""
        return self._workers_here

    async def run(self) -> None:
        """Settles until cancelled."""
        while True:
            await self.settle_all()
            await asyncio.sleep(LOOK_SECONDS)

    async def settle_all(self) -> None:
        """One look at every ledger in the folder."""
        try:
            database_id = await self._find_database_id()
            paths = sorted(self._folder.glob(f"*{SUFFIX}"))
            ledgers = [found for path in paths if (found := self._read(path, database_id))]
            # What of one ledger cannot be settled is left to the rescue.
            self._workers_here = frozenset(ledger.worker for ledger in ledgers if ledger.path not in self._reported)
            living = [ledger for ledger in ledgers if not await self._settle_dead(ledger.path)]
            await self._expired.settle_when_due(living)
        except StoreUnavailable as error:
            self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=LOOK_SECONDS)

    async def _find_database_id(self) -> UUID:
        if self._database_id is None:
            async with session(self._pool) as connection:
                self._database_id = await find_database_id(connection)
        return self._database_id

    def _read(self, path: Path, database_id: UUID) -> LivingLedger | None:
        """A ledger of this database; None where there is none that could be settled."""
        try:
            found = living_ledger(path)
        except LedgerUnreadable as error:
            self._report(path, error.message)
            return None
        if found is None or found.database_id in (None, database_id):
            return found
        if path not in self._reported:
            self._reported.add(path)
            self._log.error("ledger.foreign", file=path.name, database_id=str(found.database_id))
        return None

    async def _settle_dead(self, path: Path) -> bool:
        """Settles what a dead worker left; returns False while the worker or a session of it is alive."""
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
        bases = await self._attempt_bases(ledger)
        results = [self._result(flight, bases.get(flight.email_id, 0)) for flight in ledger.flights]
        recorded, locked = await self._record(ledger, results)
        # What was last written before the host went down may be missing, or may be old.
        released, is_all = await self._release(ledger, locked) if ledger.names_all else (0, not locked)
        if ledger.names_all:
            is_all = await self._recover(ledger, locked) and is_all
        if is_all:
            ledger.path.unlink(missing_ok=True)
        elif not (recorded or released):
            return
        uncertain = sum(result.outcome == "uncertain" for result in recorded)
        metrics.RESCUED.add(released, "worker_died")
        metrics.HELD.add(sum(result.status is Status.HELD for result in recorded), "worker_died")
        self._log.warning(
            "ledger.settled",
            worker=ledger.worker,
            reason="worker_died",
            released=released,
            recorded=len(recorded) - uncertain,
            uncertain=uncertain,
        )

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

    async def _release(self, ledger: DeadLedger, unrecorded: Collection[UUID]) -> tuple[int, bool]:
        """Gives back what is not locked and has no result to be recorded; returns how many, and whether that is all."""
        try:
            async with session(self._pool) as connection:
                suspected = await self._blame(connection, ledger) if ledger.suspects else 0
                released = suspected + await release_dead(connection, ledger.worker, unrecorded)
                return released, not (unrecorded or await has_leases(connection, ledger.worker))
        except StatementRefused:
            return await self._release_apart(ledger, unrecorded)

    async def _release_apart(self, ledger: DeadLedger, unrecorded: Collection[UUID]) -> tuple[int, bool]:
        """As `_release`, where PostgreSQL refuses to release one of them: that one is left to the rescue."""
        async with session(self._pool) as connection:
            leased = await find_leases_of(connection, ledger.worker)

        async def release(free: set[UUID]) -> int:
            async with session(self._pool) as connection:
                return await release_dead(connection, ledger.worker, leased - free)

        around = await self._locked.around(leased.difference(unrecorded), release)
        for error in around.refused.values():
            self._report(ledger.path, error.message)
        return sum(around.answers), not (unrecorded or around.locked or around.refused)

    async def _recover(self, ledger: DeadLedger, unrecorded: Collection[UUID]) -> bool:
        """Undoes rescues of what had not left, since what is uncertain has confirmed its rescue as it was recorded.

        Returns:
            Whether that was all.
        """
        async with session(self._pool) as connection:
            rescued = await find_rescued(connection, ledger.worker)
        leases = {email_id: token for email_id, token in rescued.items() if email_id not in unrecorded}
        if not leases:
            return not rescued
        store = LeaseStore(self._pool, worker=ledger.worker, slot=ledger.slot)
        around = await self._locked.around(leases, lambda free: store.recover({i: leases[i] for i in free}))
        for error in around.refused.values():
            self._report(ledger.path, error.message)
        return sum(map(len, around.answers)) == len(rescued)

    async def _blame(self, connection: AsyncSession, ledger: DeadLedger) -> int:
        tokens = {suspect.email_id: suspect.lease_token for suspect in ledger.suspects}
        crashed = await note_crashes(connection, ledger.worker, tokens, MOST_CRASHES)
        for email in crashed:
            self._log.warning(
                "email.rescued",
                email_id=str(email.email_id),
                correlation_id=email.correlation_id,
                status=email.status.value,
                crashes=email.crash_count,
                reason=Reason.WORKER_CRASHED.value,
            )
        return sum(email.status is Status.PENDING for email in crashed)

    async def _record(self, ledger: DeadLedger, results: list[Result]) -> tuple[list[Result], set[UUID]]:
        """Records what is neither locked nor refused; returns what that was, and the ids of the rest."""
        store = LeaseStore(self._pool, worker=ledger.worker, slot=ledger.slot)
        # The worker, or an earlier settlement, may have recorded some of them and died before it could say so.
        missing = [result for result in results if not await store.is_recorded(result)]
        if not missing:
            return [], set()
        around = await record_free(store, self._locked, missing)
        for error in around.refused.values():
            self._report(ledger.path, error.message)
        left = around.locked | around.refused.keys()
        return [result for result in missing if result.email_id not in left], left

    async def _attempt_bases(self, ledger: DeadLedger) -> dict[UUID, int]:
        async with session(self._pool) as connection:
            return await find_attempt_bases(connection, [flight.email_id for flight in ledger.flights])

    def _result(self, flight: Flight, attempt_base: int) -> Result:
        outcome = flight.outcome or Uncertain("The worker died while the email was on the wire.")
        decision = decide(outcome, flight.attempt_number - attempt_base, flight.policy, self._policy, random.random)
        return result_of(flight, outcome, decision)

    def _report(self, path: Path, reason: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            self._log.error("ledger.unreadable", file=path.name, reason=reason)
