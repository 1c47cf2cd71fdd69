"""Runs a peer's processes: starts them together, restarts them when they die, and measures their CPU."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.cpu import Seen, read_stat

STOP_SECONDS: Final = 8.0
PR_SET_PDEATHSIG: Final = 1


class Programs:
    """Concurrent commands, each in its own session, as under supervisord.

    Attributes:
        restarts: How often a command was restarted.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], log: Path) -> None:
        self._commands = commands
        self._environment = environment
        self._log = log
        self._running: dict[int, int] = {}
        self._ended_cpu_seconds = 0.0
        self.restarts = 0

    def start(self) -> None:
        """Start every command that does not run."""
        for number in range(len(self._commands)):
            if number not in self._running.values():
                self._spawn(number)

    def restart_dead(self) -> bool:
        """Restart commands that died, but not commands that exited normally. True while any command is running."""
        for number, code in self._reap():
            if code != 0:
                self.restarts += 1
                self._spawn(number)
        return bool(self._running)

    def cpu_seconds(self) -> float:
        """User and system CPU of all commands and their children, including children that have exited."""
        return self._ended_cpu_seconds + cpu_seconds_of(self._running)

    def pids(self) -> list[int]:
        """The pids of all running processes; the commands' own processes come first."""
        return _with_children(self._running)

    def kill(self, *, whole: bool) -> None:
        """Send SIGKILL to the process that used the most CPU. If there are children, choose among them, because they do
        the work.

        Args:
            whole: Kill a command with its children instead.
        """
        pids = self.pids()
        if whole:
            os.killpg(pids[0], signal.SIGKILL)
        else:
            os.kill(max(pids[len(self._running) :] or pids, key=_cpu_seconds), signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, later SIGKILL to the remaining processes; wait for all."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._running and time.monotonic() < deadline:
            list(self._reap())
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        while self._running:
            list(self._reap())
            time.sleep(0.02)

    def _spawn(self, number: int) -> None:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._commands[number],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - nothing here has threads
            )
        process.returncode = 0  # `_reap` has waited for the process, to get its CPU time
        self._running[process.pid] = number

    def _reap(self) -> Iterator[tuple[int, int]]:
        for pid, number in tuple(self._running.items()):
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                del self._running[pid]
                self._ended_cpu_seconds += usage.ru_utime + usage.ru_stime
                yield number, os.waitstatus_to_exitcode(status)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._running:
            # Only SIGKILL goes to the whole group. After SIGTERM, a program stops its own children.
            if number is signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


@contextmanager
def running(commands: Sequence[Sequence[str]], environment: Mapping[str, str], log: Path) -> Iterator[Programs]:
    """Run the commands for the duration of the block."""
    programs = Programs(commands, environment, log)
    programs.start()
    try:
        yield programs
    finally:
        programs.stop()


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """User and system CPU of these processes and their descendants, including descendants that have exited."""
    return sum(_cpu_seconds(pid) for pid in set(_with_children(pids)))


def _with_children(pids: Iterable[int]) -> list[int]:
    """These processes, followed by all their descendants."""
    tree = _children()
    found = list(pids)
    for pid in found:
        found.extend(tree.get(pid, ()))
    return found


def _end_with_parent() -> None:
    # If the benchmark is killed, the peer's processes end, too.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _cpu_seconds(pid: int) -> float:
    seen = _seen(pid)
    return seen.seconds if seen else 0.0


def _seen(pid: int) -> Seen | None:
    try:
        return read_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return None  # the process has exited


def _children() -> dict[int, list[int]]:
    """The children of every process on the machine."""
    tree: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (seen := _seen(int(entry.name))):
            tree.setdefault(seen.parent, []).append(seen.pid)
    return tree
