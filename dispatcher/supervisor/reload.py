"""Replaces processes one after the other, without interruption.

    a worker         its successor starts first. When the successor is up, the old worker drains. When the old worker
                     has ended, the next worker follows. If a successor cannot boot, it is retried, and the old worker
                     continues.
    relay, monitor   are replaced last. The old process ends first, and the new process starts immediately, because only
                     one of each may run at a time: a second relay would only wait to become the leader, and a second
                     monitor could not bind the address.

This module keeps no list of processes to replace. It replaces each process that was forked before the last reload, and
each worker that requests a successor. So several reloads in a row act as one reload.
"""

from __future__ import annotations

from dispatcher.supervisor.process_manager import ProcessManager
from dispatcher.supervisor.supervised import Ending, Process
from dispatcher.telemetry.log import get_log


class RollingReplacement:
    """Replaces processes one after the other. Keeps track of the replacement that is in progress."""

    def __init__(self, manager: ProcessManager) -> None:
        self._manager = manager
        self._old: Process | None = None
        self._new: Process | None = None
        self._reason = Ending.RELOADED
        self._reloading = False
        self._log = get_log()

    @property
    def is_in_progress(self) -> bool:
        """Whether a process is being replaced. If so, call `step` often."""
        return self._old is not None

    @property
    def surplus(self) -> int:
        return int(self._new is not None and self._old is not None and self._old.ending is None)

    def begin_reload(self) -> None:
        """Starts a reload. Call this after `ProcessManager.adopt`, which makes every running process outdated."""
        self._reloading = True

    def includes(self, process: Process) -> bool:
        return process in (self._old, self._new)

    def step(self) -> None:
        if self._old is not None and self._is_replaced(self._old):
            self._old = self._new = None
        if self._old is None:
            self._begin_next()
        elif self._new is not None and self._new.process_slot.is_up and self._old.ending is None:
            self._manager.stop(self._old, self._reason)

    def _is_replaced(self, old: Process) -> bool:
        if self._new is not None:
            return old not in self._manager.processes
        # The process restarts in its own slot. After the old process has ended, `ending` is None again.
        return old.ending is None

    def _begin_next(self) -> None:
        for process in sorted(self._manager.processes, key=lambda process: process.role.stops_last):
            if reason := self._reason_to_replace(process):
                self._old, self._reason = process, reason
                if process.role.count is None:
                    self._manager.stop(process, reason)
                else:
                    self._new = self._manager.add(process.role.name)
                return
        if self._reloading:
            self._reloading = False
            self._log.info("dispatcher.reloaded")

    def _reason_to_replace(self, process: Process) -> Ending | None:
        if process.pid is None or process.ending is not None:
            # The process is stopping, or waits for its start. In both cases, the next process has the new generation,
            # so this process need not be replaced.
            return None
        if process.generation < self._manager.generation:
            return Ending.RELOADED
        return Ending.RECYCLED if process.process_slot.wants_successor and process.role.count is not None else None
