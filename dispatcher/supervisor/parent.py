"""The parent process: a loop that reacts to signals and due times.

Signal handlers only record a signal; the loop acts:

    start every role ──▶ wait for a signal or a due time ──▶ reap ──▶ restart, with growing waits ──▶ …
    SIGTERM, SIGINT    drain: SIGTERM to the workers; after they have ended, to relay and monitor ──▶ exit 0
    the same again     within a second: ignored, because `timeout` and some supervisors send two signals; later: SIGKILL
                       to all processes, as if the drain took too long. The next start recovers the in-flight emails
    SIGHUP             reload: read the settings again, and replace every process without interruption (see `reload`);
                       a drain instead, if the terminal that started us has closed
    SIGTTIN, SIGTTOU   add a worker, remove a worker
    a process hangs    SIGABRT for a traceback of all its threads, then SIGKILL, then a restart

During a drain, all other signals are ignored. Each child has the read end of a pipe, the lifeline; EOF on this pipe
means that the parent is dead. Children report their state in the process table, shared memory that the monitor reads.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dispatcher.errors import ConfigurationError
from dispatcher.supervisor.process_manager import HANDLED_SIGNALS, HangWatch, ProcessManager
from dispatcher.supervisor.reload import RollingReplacement
from dispatcher.supervisor.run_dir import lock_run_dir
from dispatcher.supervisor.supervised import Ending, Role
from dispatcher.supervisor.terminal import has_terminal
from dispatcher.telemetry import metric_files
from dispatcher.telemetry.log import get_log

MAX_WORKERS: Final = 256
REPEATED_SECONDS: Final = 1.0
"""A second SIGTERM within this time counts as a repetition of the first SIGTERM, and is ignored."""
_REPLACEMENT_CHECK_SECONDS: Final = 0.05


class Parent:
    """Keeps the processes of all roles (workers, relay, monitor) running until SIGTERM or SIGINT."""

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        run_dir: Path,
        drain_seconds: float,
        hang_seconds: float = 0.0,
        metrics_folder: Path | None = None,
        counts: bool = True,
        load_roles: Callable[[], Sequence[Role]] | None = None,
    ) -> None:
        """`roles` start in this order. `counts`: whether the parent records metrics in `metrics_folder`, whose old
        files it deletes. For a reload, `load_roles` reads the settings again; it raises ConfigurationError if one is
        invalid."""
        self._run_dir = run_dir
        self._metrics_folder = metrics_folder
        self._counts = counts
        self._load_roles = load_roles or (lambda: roles)
        self._log = get_log()
        self._drain_began_at: float | None = None
        self._has_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()
        self._lock = -1
        self._lifeline, self._lifeline_end = os.pipe2(os.O_CLOEXEC)
        self._wakeup, self._wakeup_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._manager = ProcessManager(roles, drain_seconds=drain_seconds, lifeline=self._lifeline)
        self._watch = HangWatch(hang_seconds)
        self._replacement = RollingReplacement(self._manager)

    def run(self) -> int:
        """Keeps the processes running until a signal stops them. When all have ended, returns 0, or 1 if any had to be
        killed.

        Raises DispatcherError if another parent uses the same run directory.
        """
        self._lock = lock_run_dir(self._run_dir)
        if self._metrics_folder:
            metric_files.wipe(self._metrics_folder)
            if self._counts:
                metric_files.begin(self._metrics_folder, "parent")
        self._install_handlers()
        self._log.info("dispatcher.started", workers=self._worker_count, run_dir=str(self._run_dir), pid=os.getpid())
        killed_count = 0
        while not (self._is_draining and not self._manager.processes):
            self._manager.start_due(held=(self._lifeline_end, self._lock))
            for number in self._wait():
                self._act(number)
            self._manager.reap()
            for process in self._watch.find_hung(self._manager.processes):
                self._manager.abort(process)
            if self._is_draining:
                self._manager.drain_last()
            else:
                self._replacement.step()
            overdue_count = self._manager.kill_overdue()
            killed_count += overdue_count if self._is_draining else 0
        # The interpreter restores default handlers at exit. Ignore signals, so that a late signal does not change the
        # exit status.
        for number in HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._log.info("dispatcher.stopped")
        return 1 if killed_count else 0

    @property
    def _is_draining(self) -> bool:
        return self._drain_began_at is not None

    @property
    def _worker_count(self) -> int:
        """The number of workers that should run. A worker and the successor that replaces it count as one."""
        return len(self._manager.workers) - self._replacement.surplus

    def _install_handlers(self) -> None:
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        for number in HANDLED_SIGNALS:
            signal.signal(number, lambda *_: None)
        # Unblock these signals: the process that started us may have blocked them, and a process inherits blocked
        # signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)

    def _wait(self) -> list[int]:
        timeout = _REPLACEMENT_CHECK_SECONDS if self._replacement.is_in_progress else self._watch.check_seconds
        if (due_at := self._manager.due_at) is not None:
            timeout = min(timeout, max(0.0, due_at - time.monotonic()))
        ready, _, _ = select.select([self._wakeup], [], [], timeout)
        return list(os.read(self._wakeup, 4096)) if ready else []

    def _act(self, number: int) -> None:
        match signal.Signals(number):
            case signal.SIGTERM | signal.SIGINT:
                self._stop(number)
            case _ if self._is_draining:
                return
            case signal.SIGHUP if self._has_terminal and not has_terminal():
                self._stop(number)
            case signal.SIGHUP:
                self._reload()
            case signal.SIGTTIN:
                self._add_worker()
            case signal.SIGTTOU:
                self._remove_worker()

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        if self._drain_began_at is None:
            self._drain_began_at = now
            self._log.info("dispatcher.draining", signal=signal.Signals(number).name)
            self._manager.begin_drain()
        elif now - self._drain_began_at > REPEATED_SECONDS:
            self._manager.kill_now()

    def _reload(self) -> None:
        try:
            roles = self._load_roles()
        except ConfigurationError as error:
            self._log.error("dispatcher.reload_failed", reason=error.message)
            return
        except Exception as error:  # noqa: BLE001 - a failed reload must not stop the running processes
            self._log.error("dispatcher.reload_failed", reason=f"The settings cannot be read: {type(error).__name__}.")
            return
        self._log.info("dispatcher.reloading")
        self._manager.adopt(roles)
        self._replacement.begin_reload()

    def _add_worker(self) -> None:
        if self._worker_count < MAX_WORKERS:
            self._manager.add(self._manager.scaled.name)
        self._log.info("dispatcher.scaled", workers=self._worker_count)

    def _remove_worker(self) -> None:
        """Stops a worker, unless only one runs. Chooses a worker that is not being replaced."""
        if self._worker_count > 1:
            # This list is never empty, because at most one worker is being replaced.
            removable = [worker for worker in self._manager.workers if not self._replacement.includes(worker)]
            # Prefer a worker that waits for a restart.
            self._manager.stop(
                min(removable, key=lambda each: (each.pid is not None, -each.number)), Ending.SCALED_DOWN
            )
        self._log.info("dispatcher.scaled", workers=self._worker_count)
