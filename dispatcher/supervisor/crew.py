"""The parent's children: forked, told to end, reaped, and started again."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

from dispatcher.host.process_table import ChildContext, ProcessTable
from dispatcher.supervisor.child import become
from dispatcher.supervisor.heartbeat import ABORT_SECONDS
from dispatcher.supervisor.supervised import Ending, Process, Role, words_of
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

DRAIN_MARGIN_SECONDS: Final = 5.0
"""Beyond the drain time, which the workers keep themselves: for recording."""
LAST_SECONDS: Final = 10.0
"""For those who stop last. More than the deadlines of their own make together: the relay's last round, and the ends of
its connections to a RabbitMQ and a PostgreSQL that do not answer."""
HEARD: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGCHLD,
    signal.SIGHUP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""What the parent acts on."""


class Crew:
    """All children of one parent.

    Attributes:
        processes: Who runs or is to be started, in the order of the roles.
        generation: Of the roles; what was forked before the last `adopt` has an older one.
    """

    def __init__(self, roles: Sequence[Role], *, drain_seconds: float, lifeline: int) -> None:
        """
        Args:
            lifeline: What each child gets of the pipe that tells it that the parent is gone.
        """
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
        """The role that has as many processes as an operator wants: the worker."""
        return next(role for role in self._roles.values() if role.count is not None)

    @property
    def workers(self) -> list[Process]:
        """The processes of that role that were not told to end."""
        return [each for each in self.processes if each.role.count is not None and each.ending is None]

    def add(self, name: str) -> Process:
        """One more process of a role, started when `start_due` is called next."""
        role = self._roles[name]
        taken = {process.number for process in self.processes if process.role is role}
        number = next(number for number in count() if number not in taken)
        process = Process(role, number, self._process_table.take_slot(name, number), role.restarts, role.boots)
        self.processes.append(process)
        return process

    def adopt(self, roles: Sequence[Role]) -> None:
        """From now on, what is started runs these; who waits for a restart is started at once."""
        self.generation += 1
        self._roles = {role.name: role for role in roles}
        for process in self.processes:
            process.role = self._roles[process.role.name]
            if process.start_at is not None:
                process.start_at = 0.0

    @property
    def due_at(self) -> float | None:
        """When there is something to do next; None if a signal will tell."""
        due = [process.start_at for process in self.processes if process.start_at is not None]
        due += [process.kill_at for process in self.processes if process.kill_at is not None]
        return min(due, default=None)

    def start_due(self, *, held: Sequence[int]) -> None:
        """Starts whoever is due.

        Args:
            held: Descriptors of the parent that no child may hold.
        """
        for process in list(self.processes):
            if process.start_at is not None and process.start_at <= time.monotonic():
                self._start(process, held)

    def _start(self, process: Process, held: Sequence[int]) -> None:
        # What the parent has loaded stays shared memory: the collector never touches it in a child.
        gc.freeze()
        process.process_slot.begin()
        parent = os.getpid()
        # A signal to a child that still has our handlers would be noted as ours; it waits until the child has its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
            # The host is short of processes or memory: the others work on, and this one is tried again.
            self._note_end(process, None, f"not forked: {error.strerror}")
            return
        if pid == 0:
            for descriptor in held:
                os.close(descriptor)
            context = ChildContext(self._lifeline, process.number, process.process_slot, self._process_table)
            become(process.name, process.role.entry, context, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        process.began(pid, time.monotonic(), self.generation)
        self._log.info("process.started", role=process.name, pid=pid)

    def ask(self, process: Process, ending: Ending) -> None:
        """Tells a process to end, and why; it is not started again, unless there must be one and it is reloaded."""
        process.ending = ending
        process.process_slot.note_ending()
        if process.pid is None:
            self._remove(process)
            return
        seconds = LAST_SECONDS if process.role.stops_last else self._drain_seconds + DRAIN_MARGIN_SECONDS
        process.kill_by(time.monotonic() + seconds)
        os.kill(process.pid, signal.SIGTERM)

    def begin_drain(self) -> None:
        """Tells everybody to end but those who stop last; from now on, nobody is started."""
        self._is_draining = True
        for process in list(self.processes):
            if process.pid is None or (process.ending is None and not process.role.stops_last):
                self.ask(process, Ending.DRAINED)

    def drain_last(self) -> None:
        """Tells those who stop last to end, once they are alone. A second call is harmless."""
        if all(process.role.stops_last for process in self.processes):
            for process in list(self.processes):
                if process.ending is not Ending.DRAINED:
                    self.ask(process, Ending.DRAINED)

    def kill_now(self) -> None:
        """Gives nobody any more time."""
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

    def kill_late(self) -> int:
        """Kills who did not end in time; returns how many."""
        now = time.monotonic()
        late = [process for process in self.processes if process.kill_at is not None and process.kill_at <= now]
        for process in late:
            assert process.pid is not None
            self._log.error("process.killed", role=process.name, pid=process.pid)
            process.kill_at = now + DRAIN_MARGIN_SECONDS
            os.kill(process.pid, signal.SIGKILL)
        return len(late)

    def reap(self) -> None:
        """Notes whoever has ended."""
        for process in list(self.processes):
            if process.pid is not None:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    exit_code = os.waitstatus_to_exitcode(status)
                    self._note_end(process, exit_code, words_of(exit_code))

    def _note_end(self, process: Process, exit_code: int | None, how: str) -> None:
        now, pid = time.monotonic(), process.pid
        reason = process.ending or process.end_of(exit_code)
        if exit_code is None or exit_code < 0:
            process.process_slot.note_reason(f"{how}.")  # else the child has said why
        error = {"error": process.process_slot.reason} if reason is Ending.COULD_NOT_BOOT else {}
        process.ended(now)
        if process.ending is None and not self._is_draining:
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
        # A child that had not begun yet ends by the signal itself.
        tell = self._log.info if exit_code in (0, -signal.SIGTERM) else self._log.error
        tell("process.exited", role=process.name, pid=pid, exit_status=how, reason=reason)
        if reason in (Ending.RELOADED, Ending.RECYCLED):
            metrics.RESTARTS.add(1, process.role.name, reason)
        if reason is Ending.RELOADED and process.role.count is None and not self._is_draining:
            process.ending, process.start_at = None, 0.0
        else:
            self._remove(process)

    def _remove(self, process: Process) -> None:
        process.process_slot.free()
        self.processes.remove(process)
