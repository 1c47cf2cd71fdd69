"""Finds the in-flight ledgers in a host's run directory, and settles them.

Each relay settles the ledgers of its own host, because only processes of this host can read them: first the ledgers of
dead workers, and then the expired leases of live workers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.host.ledger_format import SUFFIX, LedgerUnreadable
from dispatcher.host.ledger_reader import LivingLedger, living_ledger
from dispatcher.recovery.dead_worker import DeadWorkers
from dispatcher.recovery.frozen_worker import FrozenWorkers
from dispatcher.store.connections import Pool, session
from dispatcher.store.server import find_database_id
from dispatcher.telemetry.log import get_log

POLL_SECONDS: Final = 1.0
"""How often the relay looks for ledgers, if leases are not short and the parent has reaped no process."""
RETRY_SECONDS: Final = 0.2


class LedgerRecovery:
    """A service of every relay: settles the ledgers of the relay's host."""

    def __init__(self, settings: Settings, pool: Pool) -> None:
        self.interval_seconds = min(POLL_SECONDS, settings.lease_seconds / 8)
        self._folder = settings.run_dir
        self._pool = pool
        self._log = get_log()
        self._database_id: UUID | None = None
        self._reported: set[Path] = set()
        self._workers_here: frozenset[str] | None = None
        self._dead = DeadWorkers(settings, pool, self._report)
        self._frozen = FrozenWorkers(settings, pool, self._report)

    @property
    def workers_here(self) -> Collection[str] | None:
        """The workers whose leases only this relay may settle; None until the first round has read the ledgers."""
        return self._workers_here

    async def run_once(self) -> float | None:
        """Settles every ledger in the run directory. Returns RETRY_SECONDS if it must be called again soon."""
        database_id = await self._find_database_id()
        paths = sorted(self._folder.glob(f"*{SUFFIX}"))
        ledgers = [found for path in paths if (found := self._read(path, database_id))]
        # Leave out workers whose ledgers cannot be settled: `lost_host` settles their leases.
        self._workers_here = frozenset(ledger.worker for ledger in ledgers if ledger.path not in self._reported)
        living = [ledger for ledger in ledgers if not await self._dead.settle(ledger.path)]
        await self._frozen.settle_when_due(living)
        left = (ledger.path for ledger in ledgers if ledger not in living and ledger.path not in self._reported)
        return RETRY_SECONDS if self._dead.delayed or any(path.exists() for path in left) else None

    async def _find_database_id(self) -> UUID:
        if self._database_id is None:
            async with session(self._pool) as connection:
                self._database_id = await find_database_id(connection)
        return self._database_id

    def _read(self, path: Path, database_id: UUID) -> LivingLedger | None:
        """Reads a ledger's header. None if it cannot be settled, or belongs to another database."""
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

    def _report(self, path: Path, reason: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            self._log.error("ledger.unreadable", file=path.name, reason=reason)
