"""The keeper: parent of all private servers of one folder, whose end is theirs.

Run as a file by `dispatcher.dev.processes`, with nothing but the standard library, so that it costs a few megabytes:

    keeper.py FOLDER [OWNER_PID OWNER_STARTED]

It starts what the files in FOLDER/plan describe, says in FOLDER/keeper.json which processes those are, and waits:

    SIGHUP              start whatever is planned and not running
    SIGTERM, SIGINT     stop everything, then exit
    the owner is gone   the same; by any death, SIGKILL included
    SIGKILL             the kernel ends the servers (parent-death signal), and they their children

As the "child subreaper" of its descendants it inherits orphans, so that nothing escapes its last sweep.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypedDict

WAKING = frozenset({signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
OWNER_CHECK_SECONDS = 0.25
PATIENCE_SECONDS = 16.0  # RabbitMQ takes 6 to leave in order
OWNED_PATIENCE_SECONDS = 4.0  # nobody will read their data again
STRAY_PATIENCE_SECONDS = 0.5  # a server's helpers notice by themselves that it is gone

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class ProcessIdentity(NamedTuple):
    """One process, told apart from a later one with the same pid."""

    pid: int
    started: str


class Plan(TypedDict):
    """How to start one process and how to end it.

    Attributes:
        argv: Program (an absolute path) and arguments.
        env: The whole environment.
        cwd: Working directory.
        log: File for stdout and stderr.
        stop: One signal's name or two, the second with more force; SIGKILL follows by itself.
        orphaned: Name of the signal that the kernel sends should the keeper be killed.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    stop: list[str]
    orphaned: str


class Record(TypedDict):
    """What FOLDER/keeper.json says.

    Attributes:
        keeper: The keeper's own identity.
        owner: Whose end is ours; empty if we stay until we are told to go.
        running: Identities of the servers, by name.
        exited: Exit codes (negative: signal numbers) of the servers that ended, by name.
    """

    keeper: list[int | str]
    owner: list[int | str]
    running: dict[str, list[int | str]]
    exited: dict[str, int]


def identify(pid: int, *, even_a_zombie: bool = False) -> ProcessIdentity | None:
    """The process with this pid; None if there is none, or only what its parent has not collected yet."""
    fields = _stat(pid)
    if fields is None or (fields[0] in "ZX" and not even_a_zombie):
        return None
    return ProcessIdentity(pid, f"{_boot_id()}/{fields[19]}")


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs."""
    return identify(identity.pid) == identity


def descendants(pid: int) -> list[int]:
    """Children, grandchildren and so on, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    unvisited = [pid]
    while unvisited:
        born = children.get(unvisited.pop(), [])
        found += born
        unvisited += born
    return found


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def replace_json(path: Path, content: object) -> None:
    """Write a file so that readers see the old text or the new one, never half."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file, indent=1)
    partial.replace(path)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before them may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _boot_id() -> str:
    """What tells this boot from others, whose processes may have had the same pid and start tick."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _prctl(option: int, value: int) -> None:
    """A Linux prctl(2) that we can live without, so a refusal is no fault."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Keeper:
    """The loop around the servers of one folder."""

    def __init__(self, folder: Path, owner: ProcessIdentity | None) -> None:
        self.folder = folder
        self.owner = owner
        self.names: dict[int, str] = {}
        self.identities: dict[int, ProcessIdentity] = {}
        self.exited: dict[str, int] = {}

    def run(self) -> None:
        """Start, wait, and in the end leave nothing behind."""
        self.record()
        self.wait_for_the_end()
        self.stop(OWNED_PATIENCE_SECONDS if self.owner else PATIENCE_SECONDS)
        (self.folder / "keeper.json").unlink(missing_ok=True)

    def wait_for_the_end(self) -> None:
        """Serve until everything is to stop."""
        while True:
            event = signal.sigtimedwait(WAKING, OWNER_CHECK_SECONDS)
            if self.reap():
                self.record()
            if event is not None and event.si_signo in (signal.SIGTERM, signal.SIGINT):
                return
            if event is not None and event.si_signo == signal.SIGHUP:
                self.start_missing()
            if self.owner is not None and not is_alive(self.owner):
                return

    def start_missing(self) -> None:
        """Start every planned process that does not run."""
        for path in sorted((self.folder / "plan").glob("*.json")):
            if path.stem not in self.names.values():
                self.start(path.stem, json.loads(path.read_text()))
        self.record()

    def start(self, name: str, plan: Plan) -> None:
        """Fork and exec one process, tied to our life."""
        self.exited.pop(name, None)
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _become(plan, keeper)
            except OSError as error:
                os.write(2, f"could not start {name}: {error}\n".encode())
            finally:
                os._exit(127)
        self.names[pid] = name
        self.identities[pid] = identify(pid) or ProcessIdentity(pid, "")

    def reap(self) -> bool:
        """Collect the dead, adopted ones included; whether a server was among them."""
        changed = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if name := self.names.pop(pid, None):
                    self.exited[name] = os.waitstatus_to_exitcode(status)
                    del self.identities[pid]
                    changed = True
        return changed

    def record(self) -> None:
        """Say what runs, for `stop` to find it should we be killed."""
        record: Record = {
            "keeper": list(identify(os.getpid()) or (os.getpid(), "")),
            "owner": list(self.owner or ()),
            "running": {name: list(self.identities[pid]) for pid, name in self.names.items()},
            "exited": self.exited,
        }
        replace_json(self.folder / "keeper.json", record)

    def stop(self, patience_seconds: float) -> None:
        """Ask politely, then firmly, then kill every descendant."""
        for step in range(2):
            for pid, name in self.names.items():
                words = json.loads((self.folder / "plan" / f"{name}.json").read_text())["stop"]
                for word in words[step : step + 1]:
                    send(pid, signal.Signals[word])
            self.wait_until(lambda: not self.names, patience_seconds / 2)
        self.wait_until(lambda: not descendants(os.getpid()), STRAY_PATIENCE_SECONDS)
        while left := descendants(os.getpid()):
            for pid in left:
                send(pid, signal.SIGKILL)
            self.wait_until(lambda: not descendants(os.getpid()), 0.05)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Collect the dead until the condition holds, or the time is over."""
        deadline = time.monotonic() + seconds
        self.reap()
        while not done() and time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            self.reap()


def _become(plan: Plan, keeper: int) -> None:
    """In the child: turn into the planned program; returns only by an exception."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.Signals[plan["orphaned"]])
    if os.getppid() != keeper:
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    log = os.open(plan["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(plan["cwd"])
    os.execve(plan["argv"][0], plan["argv"], plan["env"])  # noqa: S606 - no shell is what we want


def main() -> None:
    """Keep the servers of the folder named on the command line."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKING)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.chdir("/")
    os.umask(0o077)
    folder, *owner = sys.argv[1:]
    Keeper(Path(folder), ProcessIdentity(int(owner[0]), owner[1]) if owner else None).run()


if __name__ == "__main__":
    main()
