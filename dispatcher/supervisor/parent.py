"""The parent process, readable in one sitting.

Handlers only note a signal; the loop acts:

    start every role ──▶ wait for a signal or what is due ──▶ reap ──▶ start again with growing waits ──▶ …
    SIGTERM, SIGINT    drain: SIGTERM to the workers, then, when they have ended, to relay and monitor ──▶ exit 0
    another one        within a second: harmless, because `timeout` and some supervisors send two; later: SIGKILL to
                       all. So also where the drain takes too long; the next start settles what was on the wire
    SIGHUP             reload: settings are read again, and every process is replaced, without a dip (see `reload`);
                       but where the terminal is gone that it was started on, a drain
    SIGTTIN, SIGTTOU   one worker more, one less
    a process hangs    SIGABRT, for a traceback of all its threads; SIGKILL if that does not end it; started again

While it drains, everything but the end is ignored. Each child holds one end of a pipe, the lifeline: its EOF means that
the parent is gone. What a child has to say it says in the process table, a shared memory; the monitor reads it there.
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
from dispatcher.supervisor.crew import HEARD, Crew
from dispatcher.supervisor.heartbeat import HangWatch
from dispatcher.supervisor.reload import Replacing
from dispatcher.supervisor.run_dir import lock_run_dir
from dispatcher.supervisor.supervised import Ending, Role
from dispatcher.supervisor.terminal import has_terminal
from dispatcher.telemetry import metric_files
from dispatcher.telemetry.log import get_log

MOST_WORKERS: Final = 256
REPEATED_SECONDS: Final = 1.0
"""A second SIGTERM that follows so soon is the same one again."""
_REPLACING_LOOK_SECONDS: Final = 0.05


class Parent:
    """Keeps the roles running until it is told to stop."""

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
        """
        Args:
            roles: What to run, in the order of their start.
            hang_seconds: The longest time for which a process's loop may stand still; 0 for any.
            metrics_folder: Where all processes count; what an earlier run has counted there goes. None for nowhere.
            counts: Whether they do.
            load_roles: The same roles with settings that were read again; raises ConfigurationError.
        """
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
        self._crew = Crew(roles, drain_seconds=drain_seconds, lifeline=self._lifeline)
        self._watch = HangWatch(hang_seconds)
        self._replacing = Replacing(self._crew)

    def run(self) -> int:
        """Runs until every process has ended after a stop; returns 0, or 1 if some had to be killed.

        Raises:
            DispatcherError: another parent runs in the same run directory.
        """
        self._lock = lock_run_dir(self._run_dir)
        if self._metrics_folder:
            metric_files.wipe(self._metrics_folder)
            if self._counts:
                metric_files.begin(self._metrics_folder, "parent")
        self._note_signals()
        self._log.info("dispatcher.started", workers=self._worker_count, run_dir=str(self._run_dir), pid=os.getpid())
        killed_count = 0
        while not (self._is_draining and not self._crew.processes):
            self._crew.start_due(held=(self._lifeline_end, self._lock))
            for number in self._wait():
                self._act(number)
            self._crew.reap()
            self._look_after()
            late_count = self._crew.kill_late()
            killed_count += late_count if self._is_draining else 0
        # The interpreter sets handlers back as it ends; a signal that is late must not make the exit look like a death.
        for number in HEARD:
            signal.signal(number, signal.SIG_IGN)
        self._log.info("dispatcher.stopped")
        return 1 if killed_count else 0

    @property
    def _is_draining(self) -> bool:
        return self._drain_began_at is not None

    @property
    def _worker_count(self) -> int:
        """How many there should be: a predecessor and its successor are one."""
        return len(self._crew.workers) - self._replacing.surplus

    def _note_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        for number in HEARD:
            signal.signal(number, lambda *_: None)
        # Whoever started us may have blocked them, and a mask is inherited.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

    def _wait(self) -> list[int]:
        """The numbers of the signals that came, after at most the time until something is due."""
        timeout = _REPLACING_LOOK_SECONDS if self._replacing.is_under_way else self._watch.look_seconds
        if (due_at := self._crew.due_at) is not None:
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

    def _look_after(self) -> None:
        for process in self._watch.find_hung(self._crew.processes):
            self._crew.abort(process)
        if self._is_draining:
            self._crew.drain_last()
        else:
            self._replacing.step()

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        if self._drain_began_at is None:
            self._drain_began_at = now
            self._log.info("dispatcher.draining", signal=signal.Signals(number).name)
            self._crew.begin_drain()
        elif now - self._drain_began_at > REPEATED_SECONDS:
            self._crew.kill_now()

    def _reload(self) -> None:
        try:
            roles = self._load_roles()
        except ConfigurationError as error:
            self._log.error("dispatcher.reload_failed", reason=error.message)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, those who work are to work on
            self._log.error("dispatcher.reload_failed", reason=f"The settings cannot be read: {type(error).__name__}.")
            return
        self._log.info("dispatcher.reloading")
        self._crew.adopt(roles)
        self._replacing.begin_reload()

    def _add_worker(self) -> None:
        if self._worker_count < MOST_WORKERS:
            self._crew.add(self._crew.scaled.name)
        self._log.info("dispatcher.scaled", workers=self._worker_count)

    def _remove_worker(self) -> None:
        """Not one that is being replaced: of several workers there is always another."""
        if self._worker_count > 1:
            removable = [worker for worker in self._crew.workers if not self._replacing.concerns(worker)]
            # One that waits to be started again, where there is one.
            self._crew.ask(min(removable, key=lambda each: (each.pid is not None, -each.number)), Ending.SCALED_DOWN)
        self._log.info("dispatcher.scaled", workers=self._worker_count)
