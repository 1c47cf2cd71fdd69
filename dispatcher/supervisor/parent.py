"""The parent process, readable in one sitting.

Handlers only note a signal; the loop acts:

    start every role ──▶ wait for a signal or a due restart ──▶ reap ──▶ restart with growing waits ──▶ …
    SIGTERM, SIGINT ──▶ drain: SIGTERM to the workers, then, when they have ended, to relay and monitor ──▶ exit 0
    a drain that takes too long, or a second SIGTERM ──▶ SIGKILL; what was on the wire is settled at the next start

Each child holds one end of a pipe, the lifeline: its EOF means that the parent is gone.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dispatcher.errors import DispatcherError
from dispatcher.supervisor.child import Entry, become
from dispatcher.supervisor.restarts import Restarts
from dispatcher.telemetry import metric_files, metrics
from dispatcher.telemetry.log import get_log

DRAIN_MARGIN_SECONDS: Final = 5.0
"""Beyond the drain time, which the workers keep themselves: for recording, and for the relay's last round."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(slots=True)
class Role:
    """A process that the parent keeps alive.

    Attributes:
        name: Its name in logs and process titles.
        entry: What it runs.
        stops_last: Ends only when the others have: it settles what they leave, or watches them.
    """

    name: str
    entry: Entry
    stops_last: bool = False
    pid: int | None = None
    started_at: float = 0.0
    start_at: float | None = 0.0
    restarts: Restarts = field(default_factory=Restarts)


class Parent:
    """Keeps the roles running until it is told to stop."""

    def __init__(
        self, roles: Sequence[Role], *, run_dir: Path, drain_seconds: float, metrics_folder: Path | None = None
    ) -> None:
        """
        Args:
            metrics_folder: Where all processes count; None if they do not.
        """
        self._roles = roles
        self._metrics_folder = metrics_folder
        self._run_dir = run_dir
        self._drain_seconds = drain_seconds
        self._log = get_log()
        self._kill_at: float | None = None
        self._asked_last = False
        self._lock = -1
        self._lifeline, self._lifeline_end = os.pipe2(os.O_CLOEXEC)
        self._wakeup, self._wakeup_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        """Runs until every role has ended after a stop; returns 0, or 1 if some had to be killed.

        Raises:
            DispatcherError: another parent runs in the same run directory.
        """
        self._lock = lock_run_dir(self._run_dir)
        if self._metrics_folder:
            metric_files.wipe(self._metrics_folder)
            metric_files.begin(self._metrics_folder, "parent")
        self._note_signals()
        self._log.info("dispatcher.started", workers=self._worker_count, run_dir=str(self._run_dir), pid=os.getpid())
        clean = True
        while self._kill_at is None or any(role.pid for role in self._roles):
            self._start_due()
            for number in self._wait():
                self._act(number)
            self._reap()
            self._stop_last()
            clean = self._kill_late() and clean
        self._log.info("dispatcher.stopped")
        return 0 if clean else 1

    @property
    def _worker_count(self) -> int:
        return sum(not role.stops_last for role in self._roles)

    @property
    def _draining(self) -> bool:
        return self._kill_at is not None

    def _note_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        # Whoever started us may have blocked them, and a mask is inherited.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _wait(self) -> list[int]:
        """The numbers of the signals that came, after at most the time until something is due."""
        due = [role.start_at for role in self._roles if role.start_at is not None and not self._draining]
        due += [self._kill_at] if self._kill_at is not None else []
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([self._wakeup], [], [], timeout)
        return list(os.read(self._wakeup, 4096)) if ready else []

    def _act(self, number: int) -> None:
        if number not in (signal.SIGTERM, signal.SIGINT):
            return
        if self._draining:
            self._kill_at = time.monotonic()
            return
        self._log.info("dispatcher.draining", signal=signal.Signals(number).name)
        self._kill_at = time.monotonic() + self._drain_seconds + DRAIN_MARGIN_SECONDS
        self._send(signal.SIGTERM, [role for role in self._roles if not role.stops_last])

    def _stop_last(self) -> None:
        if self._draining and not self._asked_last and not any(r.pid for r in self._roles if not r.stops_last):
            self._asked_last = True
            self._send(signal.SIGTERM, self._roles)

    def _kill_late(self) -> bool:
        """Kills what did not end in time; returns whether there was nothing to kill."""
        if self._kill_at is None or time.monotonic() < self._kill_at:
            return True
        late = [role for role in self._roles if role.pid]
        for role in late:
            self._log.error("process.killed", role=role.name, pid=role.pid)
        self._send(signal.SIGKILL, late)
        self._kill_at = time.monotonic() + DRAIN_MARGIN_SECONDS
        return not late

    def _send(self, number: int, roles: Sequence[Role]) -> None:
        for role in roles:
            if role.pid:
                os.kill(role.pid, number)

    def _start_due(self) -> None:
        now = time.monotonic()
        for role in self._roles:
            if role.start_at is not None and role.start_at <= now and not self._draining:
                self._start(role)

    def _start(self, role: Role) -> None:
        # What the parent has loaded stays shared memory: the collector never touches it in a child.
        gc.freeze()
        parent = os.getpid()
        # A signal to a child that still has our handlers would be noted as ours; it waits until the child has its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            # The host is short of processes or memory: the others work on, and this one is tried again.
            role.started_at = time.monotonic()
            self._note_end(role, f"not forked: {error.strerror}")
            return
        if pid == 0:
            for descriptor in (self._lifeline_end, self._lock):
                os.close(descriptor)
            become(role.name, role.entry, self._lifeline, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        role.pid, role.started_at, role.start_at = pid, time.monotonic(), None
        self._log.info("process.started", role=role.name, pid=pid)

    def _reap(self) -> None:
        for role in self._roles:
            if role.pid is None:
                continue
            pid, status = os.waitpid(role.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._note_end(role, f"signal {_signal_name(-code)}" if code < 0 else f"exit {code}")

    def _note_end(self, role: Role, how: str) -> None:
        now = time.monotonic()
        pid, role.pid = role.pid, None
        if self._draining:
            # A child that had not begun yet ends by the signal itself.
            tell = self._log.info if how in ("exit 0", "signal SIGTERM") else self._log.error
            tell("process.exited", role=role.name, pid=pid, how=how)
            return
        metrics.RESTARTS.add(1, role.name.split()[0], _reason(how))
        role.restarts = role.restarts.after(now - role.started_at)
        role.start_at = now + role.restarts.wait_seconds
        self._log.error(
            "process.exited", role=role.name, pid=pid, how=how, retry_in_seconds=round(role.restarts.wait_seconds, 1)
        )


def _reason(how: str) -> str:
    """An end in a word for the metrics."""
    return {"exit": "exit", "signal": "signal"}.get(how.split(maxsplit=1)[0], "not_forked")


def _signal_name(number: int) -> str:
    # Real-time signals have numbers only.
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


def lock_run_dir(run_dir: Path) -> int:
    """Makes the run directory and locks it for this process's life; returns the lock's descriptor.

    Raises:
        DispatcherError: another `dispatcher run` holds it, or it cannot be made.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(run_dir / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DispatcherError(
            f"The run directory {run_dir} cannot be used: {error.strerror}.",
            remedy="Set DISPATCHER_RUN_DIR to a folder that this user may write.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DispatcherError(
            f"Another `dispatcher run` uses the run directory {run_dir}.",
            remedy="Stop it, or give this one a DISPATCHER_RUN_DIR of its own.",
        ) from error
    return descriptor
