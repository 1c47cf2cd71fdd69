"""A host whose worker is killed after given steps of each email, to test how recovery settles its emails."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID
from zlib import crc32

from dispatcher.config import Settings, load
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.status import OnUncertain
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import HEADER, WITHOUT_DATABASE
from dispatcher.recovery.ledgers import LedgerRecovery
from dispatcher.store.connections import LOCK_SECONDS, connect_async, make_pool
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.outbox import Outbox
from tests.store.books import Books, Row
from tests.store.fixtures import DATABASE_ID

WORKER = "host:w0:17:cafe"
SLOT = "slot-1"
RELAY = "dispatcher relay settlement"

STARTED_AT = 1_790_000_000.0
BEGAN = datetime.fromtimestamp(STARTED_AT, UTC)
EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)

Step = Callable[[Ledger, Lease], object]


def unsent(_ledger: Ledger, _lease: Lease) -> None:
    """Does nothing with the leased email."""


def on_the_wire(ledger: Ledger, lease: Lease, provider: str = "smtp", started_at: float = STARTED_AT) -> int:
    return ledger.mark_on_wire(
        lease.email_id,
        lease.token,
        lease.attempt_number,
        provider=provider,
        started_at=started_at,
        policy=lease.on_uncertain or OnUncertain.HOLD,
    )


def answered(outcome: Outcome, provider: str = "smtp", started_at: float = STARTED_AT) -> Step:
    """A step that writes the provider's answer to the ledger but not to PostgreSQL."""

    def step(ledger: Ledger, lease: Lease) -> None:
        slot = on_the_wire(ledger, lease, provider, started_at)
        ledger.mark_answered(slot, outcome, finished_at=started_at + 1.0)

    return step


def rendering(ledger: Ledger, lease: Lease) -> None:
    ledger.begin_rendering(lease.email_id, lease.token)


def settings(**given: str) -> Settings:
    return load({"DISPATCHER_MAX_ATTEMPTS": "3", **given})


@dataclass
class Host:
    """A host with the ledger of one worker. The test's process opens the worker's sessions, so they can outlive the
    worker."""

    url: str
    run_dir: Path
    books: Books
    worker: LeaseStore

    async def lease(self, count: int = 1, *, by: LeaseStore | None = None, **columns: Any) -> list[Lease]:
        """Leases new emails with these columns, in order of their ids."""
        email_ids = self.books.enqueue(count)
        for email_id in email_ids if columns else ():
            self.books.change(email_id, **columns)
        leases = await (by or self.worker).lease(self.books.keys(email_ids), 600)
        return sorted(leases, key=lambda each: each.email_id)

    def die(
        self,
        *steps: tuple[Lease, Step],
        worker: str = WORKER,
        boot: str | None = None,
        database_id: UUID | None = DATABASE_ID,
    ) -> None:
        """Runs these steps in a worker process that is then killed with SIGKILL. The previous format has no
        `database_id`."""
        pid = os.fork()
        if pid == 0:
            try:
                ledger = Ledger(self.run_dir, worker=worker, slot=SLOT, slots=max(1, len(steps)), boot=boot)
                if database_id is None:
                    turn_into_previous_format(ledger.path)
                else:
                    ledger.set_database(database_id)
                for lease, step in steps:
                    step(ledger, lease)
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    @asynccontextmanager
    async def recovery(self, lock_seconds: float = LOCK_SECONDS, /, **given: str) -> AsyncIterator[LedgerRecovery]:
        async with make_pool(self.url, name=RELAY, size=1, lock_seconds=lock_seconds) as pool:
            yield LedgerRecovery(settings(DISPATCHER_RUN_DIR=str(self.run_dir), **given), pool)

    async def settle(self, **given: str) -> None:
        async with self.recovery(**given) as recovery:
            await recovery.run_once()

    async def recover_elsewhere(self) -> None:
        """Makes all leases expire, and holds their emails as a relay of a different host would."""
        self.books.connection.execute("update email_log set locked_until = %s where status = 'sending'", [EXPIRED])
        async with await connect_async(self.url, name="leader") as session:
            outbox = Outbox(session)
            await outbox.recover_expired(OnUncertain.HOLD, 3, await outbox.find_expiring())

    def row(self, lease: Lease) -> Row:
        return self.books.row(lease.email_id)

    def statuses(self, *leases: Lease) -> list[str]:
        return [self.books.status(each.email_id) for each in leases]

    def outcomes(self, *leases: Lease) -> list[list[str]]:
        return [self.books.outcomes(each.email_id) for each in leases]

    def ledgers(self) -> list[str]:
        return sorted(path.name for path in self.run_dir.iterdir())


def turn_into_previous_format(path: Path) -> None:
    """Changes the header of a ledger, whose only other difference from the previous format is the database's id."""
    with path.open("r+b") as file:
        magic, _, *sizes, worker, slot, boot, _ = HEADER.unpack(file.read(HEADER.size))
        fields = (magic, WITHOUT_DATABASE, *sizes, *(name.rstrip(b"\0") for name in (worker, slot, boot)))
        file.seek(0)
        file.write(HEADER.pack(*fields, crc32(repr(fields).encode())))
