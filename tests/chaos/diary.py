"""Records the adversary's actions: what the adversary did to which process, and when."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import orjson

from dispatcher.dev.wire import Disturbance


class Diary:
    """The actions, and the processes that the actions hit. Each action is also written to the file as a line.

    Attributes:
        garbage: Bodies that the adversary may have injected.
        struck_at: The times of actions that can prevent a worker from renewing its leases.
        cancelling: The emails that the adversary tried to cancel.
        cancelled_at: When the answer "cancelled" came, by email.
        ledgerless: The pids of workers whose ledger was deleted, by the worker's name in `email_log.locked_by`.
    """

    def __init__(self, path: Path) -> None:
        self.actions: Counter[str] = Counter()
        self.faults: list[str] = []
        self.garbage: set[bytes] = set()
        self.struck_at: list[float] = []
        self.cancelling: set[UUID] = set()
        self.cancelled_at: dict[UUID, float] = {}
        self.too_late: set[UUID] = set()
        self.ledgerless: dict[str, int] = {}
        self._path = path
        self._disturbances: list[Disturbance] = []
        self._frozen: dict[int, int] = {}

    def note(self, action: str, *, strikes: bool) -> None:
        """Record an action. It strikes if it can prevent a worker from renewing its leases."""
        self.actions[action] += 1
        if strikes:
            self.struck_at.append(time.time())
        self.note_event(action)

    def note_event(self, what: str, **details: object) -> None:
        line = {"at": time.time(), "what": what, **details}
        with self._path.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE, default=str))

    def note_fault(self, fault: str) -> None:
        self.faults.append(fault)
        self.note_event("fault", words=fault)

    def kill(self, pid: int) -> None:
        since = time.time()
        os.kill(pid, signal.SIGKILL)
        self._disturbances.append(Disturbance(pid, since))

    def freeze(self, pid: int) -> None:
        since = time.time()
        os.kill(pid, signal.SIGSTOP)
        self._frozen[pid] = len(self._disturbances)
        self._disturbances.append(Disturbance(pid, since))

    def thaw(self, pid: int) -> None:
        index = self._frozen.pop(pid)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        self._disturbances[index] = replace(self._disturbances[index], until=time.time())

    @property
    def frozen(self) -> tuple[int, ...]:
        return tuple(self._frozen)

    @property
    def disturbances(self) -> tuple[Disturbance, ...]:
        return tuple(self._disturbances)
