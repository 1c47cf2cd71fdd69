"""Manages the parent's children: forks, stops, reaps and restarts them."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

from dispatcher.host.process_table import ChildContext, ProcessTable
from dispatcher.supervisor.child import run_child
from dispatcher.supervisor.supervised import Ending, Process, Role, describe_exit
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

DRAIN_MARGIN_SECONDS: Final = 5.0
"""How long a worker may run after its own drain deadline, to record the last results, before the parent kills it."""
STOP_LAST_SECONDS: Final = 10.0
"""How long a role that stops last may take to end. The relay has a deadline for its last round, and another deadline
for closing its connections. This time is longer than both deadlines together."""
CHECK_SECONDS: Final = 1.0
BOOT_SECONDS: Final = 60.0
"""A process may take at least this long until its first heartbeat, because a start can be slow on a loaded host. Until
then, the process has leased no emails."""
ABORT_SECONDS: Final = 2.0
"""The time that a hung process has to print the traceback of all its threads, before SIGKILL."""
HANDLED_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGCHLD,
    signal.SIGHUP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""The signals that the parent handles."""


class ProcessManager:
    """Starts, stops, reaps and restarts all children of one parent. A process that was forked before the last `adopt`
    has a smaller `generation`."""

    def __init__(self, roles: Sequence[Role], *, drain_seconds: float, lifeline: int) -> None:
        self.processes: list[Process] = []
        self.generation = 0
        self._roles = {role.name: role for role in roles}
        self._is_draining = False
        self._process_table = ProcessTable(list(self._roles))
        self._drain_seconds = drain_seconds
        self._lifeline = lifeline
        self._log = get_log()
        for role in roles:
            for _ in range(role.count or 1):
                self.add(role.name)

    @property
    def scaled(self) -> Role:
        return next(role for role in self._roles.values() if role.count is not None)

    @property
    def workers(self) -> list[Process]:
        return [each for each in self.processes if each.role.count is not None and each.ending is None]

    def add(self, name: str) -> Process:
        """Adds a process of a role. The next `start_due` starts it."""
        role = self._roles[name]
        taken = {process.number for process in self.processes if process.role is role}
        number = next(number for number in count() if number not in taken)
        process = Process(role, number, self._process_table.take_slot(name, number), role.restarts, role.boots)
        self.processes.append(process)
        return process

    def adopt(self, roles: Sequence[Role]) -> None:
        """Uses these roles, with settings that were read again, for all further starts. A process that waits for a
        restart starts immediately."""
        self.generation += 1
        self._roles = {role.name: role for role in roles}
        for process in self.processes:
            process.role = self._roles[process.role.name]
            if process.start_at is not None:
                process.start_at = 0.0

    @property
    def due_at(self) -> float | None:
        """The time of the next start or kill; None if none is planned."""
        due = [process.start_at for process in self.processes if process.start_at is not None]
        due += [process.kill_at for process in self.processes if process.kill_at is not None]
        return min(due, default=None)

    def start_due(self, *, held: Sequence[int]) -> None:
        """Starts the processes that are due. `held`: the parent's file descriptors that a child must close."""
        for process in list(self.processes):
            if process.start_at is not None and process.start_at <= time.monotonic():
                self._start(process, held)

    def _start(self, process: Process, held: Sequence[int]) -> None:
        # Freeze the parent's objects, so that the children's garbage collectors do not write to them. The memory pages
        # of these objects then stay shared (copy-on-write).
        gc.freeze()
        process.process_slot.begin()
        parent = os.getpid()
        # Block signals until the child has its own handlers. Otherwise, a signal to the child would be recorded as a
        # signal to the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
            # The host is short of processes or memory. The other processes continue, and this start is retried.
            self._note_end(process, None, f"not forked: {error.strerror}")
            return
        if pid == 0:
            for descriptor in held:
                os.close(descriptor)
            context = ChildContext(self._lifeline, process.number, process.process_slot, self._process_table)
            run_child(process.name, process.role.entry, context, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        process.note_start(pid, time.monotonic(), self.generation)
        self._log.info("process.started", role=process.name, pid=pid)

    def stop(self, process: Process, ending: Ending) -> None:
        """Stops a process. The only process of a role that reloads is started again after it has ended."""
        process.ending = ending
        process.process_slot.note_ending()
        if process.pid is None:
            self._remove(process)
            return
        seconds = STOP_LAST_SECONDS if process.role.stops_last else self._drain_seconds + DRAIN_MARGIN_SECONDS
        process.kill_by(time.monotonic() + seconds)
        os.kill(process.pid, signal.SIGTERM)

    def begin_drain(self) -> None:
        """Stops all processes, except those that stop last. From now on, no process is started."""
        self._is_draining = True
        for process in list(self.processes):
            if process.pid is None or (process.ending is None and not process.role.stops_last):
                self.stop(process, Ending.DRAINED)

    def drain_last(self) -> None:
        if all(process.role.stops_last for process in self.processes):
            for process in list(self.processes):
                if process.ending is not Ending.DRAINED:
                    self.stop(process, Ending.DRAINED)

    def kill_now(self) -> None:
        for process in self.processes:
            process.kill_by(time.monotonic())

    def abort(self, process: Process) -> None:
        """Ends a process that hangs, with a traceback of all its threads on stderr."""
        assert process.pid is not None
        process.is_hung = True
        process.kill_by(time.monotonic() + ABORT_SECONDS)
        silent_seconds = round(process.silent_seconds, 1)
        self._log.error("process.hung", role=process.name, pid=process.pid, silent_seconds=silent_seconds)
        os.kill(process.pid, signal.SIGABRT)

    def kill_overdue(self) -> int:
        """Kills the processes that did not end in time; returns how many."""
        now = time.monotonic()
        overdue = [process for process in self.processes if process.kill_at is not None and process.kill_at <= now]
        for process in overdue:
            assert process.pid is not None
            self._log.error("process.killed", role=process.name, pid=process.pid)
            process.kill_at = now + DRAIN_MARGIN_SECONDS
            os.kill(process.pid, signal.SIGKILL)
        return len(overdue)

    def reap(self) -> None:
        for process in list(self.processes):
            if process.pid is not None:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    exit_code = os.waitstatus_to_exitcode(status)
                    self._note_end(process, exit_code, describe_exit(exit_code))
                    for other in self.processes:  # the relay settles the worker's ledger; others ignore this signal
                        if other.pid is not None and other.role.stops_last:
                            os.kill(other.pid, signal.SIGURG)

    def _note_end(self, process: Process, exit_code: int | None, how: str) -> None:
        now, pid = time.monotonic(), process.pid
        reason = process.ending or process.ending_of(exit_code)
        if exit_code is None or exit_code < 0:
            # The child could not record a reason itself: it was not forked, or a signal ended it.
            process.process_slot.note_reason(f"{how}.")
        error = {"error": process.process_slot.reason} if reason is Ending.COULD_NOT_BOOT else {}
        process.note_exit(now)
        if process.ending is None and not self._is_draining:
            process.process_slot.note_restart()
            metrics.RESTARTS.add(1, process.role.name, reason)
            seconds = round((process.start_at or now) - now, 1)
            self._log.error(
                "process.exited",
                role=process.name,
                pid=pid,
                exit_status=how,
                reason=reason,
                retry_in_seconds=seconds,
                **error,
            )
            return
        # -SIGTERM: the child had not yet installed its handler, so the signal itself ended the child.
        log = self._log.info if exit_code in (0, -signal.SIGTERM) else self._log.error
        log("process.exited", role=process.name, pid=pid, exit_status=how, reason=reason)
        if reason in (Ending.RELOADED, Ending.RECYCLED):
            metrics.RESTARTS.add(1, process.role.name, reason)
        if reason is Ending.RELOADED and process.role.count is None and not self._is_draining:
            process.ending, process.start_at = None, 0.0
        else:
            self._remove(process)

    def _remove(self, process: Process) -> None:
        process.process_slot.free()
        self.processes.remove(process)


class HangWatch:
    """Detects hung processes: those whose event loop has sent no heartbeat for `hang_seconds`; 0 disables the check.

    If the host is suspended or the container frozen, no process can send heartbeats, but the clock continues. So each
    check adds at most two check intervals to the measured time, and no process is killed because of an interruption.
    """

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self.check_seconds = min(CHECK_SECONDS, hang_seconds / 4) if hang_seconds else CHECK_SECONDS
        self._checked_at = time.monotonic()

    def find_hung(self, processes: Iterable[Process]) -> list[Process]:
        """Returns the processes that have hung for too long and are not yet aborted. Call every `check_seconds`."""
        now = time.monotonic()
        passed_seconds, self._checked_at = min(now - self._checked_at, 2 * self.check_seconds), now
        return [process for process in processes if process.pid and self._is_hung(process, passed_seconds)]

    def _is_hung(self, process: Process, passed_seconds: float) -> bool:
        beats = process.process_slot.beats
        if beats != process.beats:
            process.beats, process.silent_seconds = beats, 0.0
        else:
            process.silent_seconds += passed_seconds
        longest = self._hang_seconds if beats else max(self._hang_seconds, BOOT_SECONDS)
        return self._hang_seconds > 0 and not process.is_hung and process.silent_seconds > longest
