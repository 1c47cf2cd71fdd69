"""Kills worker processes after given steps of each email, to test how recovery settles their emails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID
from zlib import crc32

from dispatcher.domain.outcome import Outcome
from dispatcher.domain.status import OnUncertain
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import HEADER, WITHOUT_DATABASE
from dispatcher.store.leases import Lease
from tests.store.fixtures import DATABASE_ID

WORKER = "host:w0:17:cafe"
SLOT = "slot-1"

STARTED_AT = 1_790_000_000.0
BEGAN = datetime.fromtimestamp(STARTED_AT, UTC)

Step = Callable[[Ledger, Lease], object]


def unsent(_ledger: Ledger, _lease: Lease) -> None:
    """Does nothing with the leased email."""


def on_the_wire(ledger: Ledger, lease: Lease, provider: str = "smtp", started_at: float = STARTED_AT) -> int:
    """Marks the email as on the wire."""
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
    """Marks the email as being rendered."""
    ledger.begin_rendering(lease.email_id, lease.token)


def die(
    run_dir: Path,
    steps: Sequence[tuple[Lease, Step]],
    *,
    worker: str = WORKER,
    boot: str | None = None,
    database_id: UUID | None = DATABASE_ID,
) -> None:
    """Runs these steps in a worker process that is then killed with SIGKILL. The previous format has no
    `database_id`."""
    pid = os.fork()
    if pid == 0:
        try:
            ledger = Ledger(run_dir, worker=worker, slot=SLOT, slots=max(1, len(steps)), boot=boot)
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


def turn_into_previous_format(path: Path) -> None:
    """Changes the header of a ledger, whose only other difference from the previous format is the database's id."""
    with path.open("r+b") as file:
        magic, _, *sizes, worker, slot, boot, _ = HEADER.unpack(file.read(HEADER.size))
        fields = (magic, WITHOUT_DATABASE, *sizes, *(name.rstrip(b"\0") for name in (worker, slot, boot)))
        file.seek(0)
        file.write(HEADER.pack(*fields, crc32(repr(fields).encode())))
