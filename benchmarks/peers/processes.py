"""A peer's processes: started together, started again when they die, with the CPU of all of them, children included."""

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
    """Commands that run at the same time, each in a session of its own, as supervisord would have them.

    Attributes:
        restarts: How often one of them was started again.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], log: Path) -> None:
        self._commands = commands
        self._environment = environment
        self._log = log
        self._running: dict[int, int] = {}
        self._ended_cpu_seconds = 0.0
        self.restarts = 0

    def start(self) -> None:
        """Start every one that does not run."""
        for number in range(len(self._commands)):
            if number not in self._running.values():
                self._spawn(number)

    def look(self) -> bool:
        """Start again what has died; what ended by itself stays ended. True while one of them runs."""
        for number, code in self._reap():
            if code != 0:
                self.restarts += 1
                self._spawn(number)
        return bool(self._running)

    def cpu_seconds(self) -> float:
        """Of all of them and their children, user and system, those that ended included."""
        return self._ended_cpu_seconds + cpu_seconds_of(self._running)

    def pids(self) -> list[int]:
        """Every process that runs, the commands' own first."""
        return _with_children(self._running)

    def kill(self, *, whole: bool) -> None:
        """SIGKILL to the process that has used most CPU; of the children, where there are some, for they do the work.

        Args:
            whole: To a command and its children instead.
        """
        pids = self.pids()
        if whole:
            os.killpg(pids[0], signal.SIGKILL)
        else:
            os.kill(max(pids[len(self._running) :] or pids, key=_cpu_seconds), signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whoever is left; waits for them."""
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
        process.returncode = 0  # we wait for it ourselves, to be told of its CPU
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
            # To the group only when it must end: a program tells its own children when to stop.
            if number is signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


@contextmanager
def running(commands: Sequence[Sequence[str]], environment: Mapping[str, str], log: Path) -> Iterator[Programs]:
    """The commands, for as long as the block lasts."""
    programs = Programs(commands, environment, log)
    programs.start()
    try:
        yield programs
    finally:
        programs.stop()


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """Of processes and all below them, user and system, those below that ended included."""
    return sum(_cpu_seconds(pid) for pid in set(_with_children(pids)))


def _with_children(pids: Iterable[int]) -> list[int]:
    """These processes, and after them all that are below them."""
    tree = _children()
    found = list(pids)
    for pid in found:
        found.extend(tree.get(pid, ()))
    return found


def _end_with_parent() -> None:
    # A benchmark that is killed leaves nothing behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _cpu_seconds(pid: int) -> float:
    seen = _seen(pid)
    return seen.seconds if seen else 0.0


def _seen(pid: int) -> Seen | None:
    try:
        return read_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return None  # it ended


def _children() -> dict[int, list[int]]:
    """Of every process of the machine."""
    tree: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (seen := _seen(int(entry.name))):
            tree.setdefault(seen.parent, []).append(seen.pid)
    return tree
