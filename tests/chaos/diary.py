"""What the adversary did to whom, and when."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import orjson

from dispatcher.dev.wire import Disturbance


class Diary:
    """Deeds and their victims; every deed is a line of the file, too.

    Attributes:
        deeds: How often each was done.
        faults: What our own processes did that they must not.
        garbage: Bodies that may have been injected.
        struck_at: When a deed was done that can keep a worker from renewing its leases.
        ledgerless: The pids of workers whose ledger was deleted, by their identity in `email_log.locked_by`.
    """

    def __init__(self, path: Path) -> None:
        self.deeds: Counter[str] = Counter()
        self.faults: list[str] = []
        self.garbage: set[bytes] = set()
        self.struck_at: list[float] = []
        self.ledgerless: dict[str, int] = {}
        self._path = path
        self._disturbances: list[Disturbance] = []
        self._frozen: dict[int, int] = {}

    def note(self, deed: str, *, strikes: bool = True, **details: object) -> None:
        """A deed was done.

        Args:
            strikes: Whether it can keep a worker from renewing its leases.
        """
        self.deeds[deed] += 1
        if strikes:
            self.struck_at.append(time.time())
        self.remark(deed, **details)

    def remark(self, what: str, **details: object) -> None:
        """Something happened that nobody counts."""
        line = {"at": time.time(), "what": what, **details}
        with self._path.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE, default=str))

    def blame(self, fault: str) -> None:
        """One of ours did what it must not."""
        self.faults.append(fault)
        self.remark("fault", words=fault)

    def kill(self, pid: int) -> None:
        """SIGKILLs a process; raises ProcessLookupError if it is gone."""
        since = time.time()
        os.kill(pid, signal.SIGKILL)
        self._disturbances.append(Disturbance(pid, since))

    def freeze(self, pid: int) -> None:
        """SIGSTOPs a process; raises ProcessLookupError if it is gone."""
        since = time.time()
        os.kill(pid, signal.SIGSTOP)
        self._frozen[pid] = len(self._disturbances)
        self._disturbances.append(Disturbance(pid, since))

    def thaw(self, pid: int) -> None:
        """SIGCONTs a frozen process, if it is still there."""
        index = self._frozen.pop(pid)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        self._disturbances[index] = replace(self._disturbances[index], until=time.time())

    @property
    def frozen(self) -> tuple[int, ...]:
        """Processes that are stopped now."""
        return tuple(self._frozen)

    @property
    def disturbances(self) -> tuple[Disturbance, ...]:
        """Who was killed or frozen, and when."""
        return tuple(self._disturbances)
