"""Workers whose ledger was deleted: what they had leased when they ended or stood still, nobody can know.

    add(worker, …)   the ledger is gone
    step()           while the worker is dead, stopped or cut off, what it has under lease is written into the diary

No other email may be held for want of a ledger.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from tests.chaos.diary import Diary
from tests.chaos.network import Network

LOOK_SECONDS: Final = 0.2
_LEASED: Final = "select email_id from email_log where locked_by = %s and status = 'sending'"


@dataclass(slots=True)
class _Orphan:
    pid: int
    network: Network | None
    looked_at: float = 0.0
    died_at: float | None = None


class Orphans:
    """All of them."""

    def __init__(self, database_url: str, diary: Diary, *, watch_seconds: float) -> None:
        """
        Args:
            watch_seconds: How long a dead worker is watched: until the first lease of it can have been judged.
        """
        self._database_url = database_url
        self._diary = diary
        self._watch_seconds = watch_seconds
        self._orphans: dict[str, _Orphan] = {}

    def add(self, worker: str, pid: int, network: Network | None) -> None:
        """The ledger of this worker was deleted."""
        self._orphans[worker] = _Orphan(pid, network)

    def step(self) -> None:
        """Notes the leases of those that are dead, stopped or cut off; to be called again and again."""
        now = time.monotonic()
        for worker, orphan in list(self._orphans.items()):
            state = _state(orphan.pid)
            is_silent = state in "ZXT" or bool(orphan.network and orphan.network.away)
            if not is_silent or now < orphan.looked_at + LOOK_SECONDS:
                continue
            if not self._note(worker):
                continue
            orphan.looked_at = now
            if state in "ZX":
                orphan.died_at = orphan.died_at or now
                if now > orphan.died_at + self._watch_seconds:
                    del self._orphans[worker]

    def _note(self, worker: str) -> bool:
        with (
            suppress(psycopg.Error),
            psycopg.connect(
                self._database_url, autocommit=True, connect_timeout=2, options="-c statement_timeout=1000"
            ) as session,
        ):
            found = {row[0] for row in session.execute(_LEASED, [worker])}
            if new := found - self._diary.unledgered:
                self._diary.remark("leases without a ledger", worker=worker, email_ids=sorted(new))
            self._diary.unledgered |= found
            return True
        return False


def _state(pid: int) -> str:
    """The kernel's letter for a process; X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
