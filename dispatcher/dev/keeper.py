"""The keeper: the parent process of all private servers of one folder. When the keeper exits, the servers exit.

`dispatcher.dev.processes` runs this file as a program. The program uses only the standard library, so it needs only a
few megabytes of memory:

    keeper.py FOLDER [OWNER_PID OWNER_STARTED]

The owner is the process that needs the servers, such as a test run. The keeper starts the processes that the files in
FOLDER/plan describe, writes their pids to FOLDER/keeper.json, and waits:

    SIGHUP              the keeper starts every planned process that is not running
    SIGTERM, SIGINT     the keeper stops all processes, then exits
    the owner exits     the same; also if the owner was killed
    SIGKILL             the kernel kills the servers (parent-death signal); the servers' children exit, too

The keeper is a "child subreaper": orphaned descendants become its children, so it can stop them, too.
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
STOP_SECONDS = 16.0  # long enough for a clean stop of RabbitMQ, which takes 6 s
OWNED_STOP_SECONDS = 4.0  # short, because the data is of no use after the owner's exit
ORPHAN_STOP_SECONDS = 0.5  # short: a server's helper processes exit by themselves when the server has exited

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class ProcessIdentity(NamedTuple):
    """Identifies one process: a later process with the same pid has a different identity. `started` has the id of the
    boot, and the process's start time in clock ticks since the boot."""

    pid: int
    started: str


class Plan(TypedDict):
    """How to start and stop one process.

    Attributes:
        stop: The names of one or two signals that stop the process. The keeper sends the second signal if the process
            is still running some seconds after the first, and SIGKILL if it is still running after the last.
        orphaned: The name of the signal that the kernel sends to the process if the keeper is killed.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    stop: list[str]
    orphaned: str


class Record(TypedDict):
    """The content of FOLDER/keeper.json. When the owner exits, the keeper exits, too. `exited` has the exit codes of
    servers; a negative number of a signal, such as -9, if a signal killed the server."""

    keeper: list[int | str]
    owner: list[int | str]
    running: dict[str, list[int | str]]
    exited: dict[str, int]


def identify(pid: int, *, even_a_zombie: bool = False) -> ProcessIdentity | None:
    fields = _stat(pid)
    if fields is None or (fields[0] in "ZX" and not even_a_zombie):
        return None
    return ProcessIdentity(pid, f"{_boot_id()}/{fields[19]}")


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this process is still running; a later process with the same pid does not count."""
    return identify(identity.pid) == identity


def descendants(pid: int) -> list[int]:
    """The pids of all descendants of a process, including zombies."""
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
    """Sends a signal to a process; does nothing if the process has exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def replace_json(path: Path, content: object) -> None:
    """Writes a JSON file atomically: readers see either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file, indent=1)
    partial.replace(path)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the process's name, which may contain spaces and parentheses."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _boot_id() -> str:
    """The id of this boot. After a reboot, a different process can have the same pid and start time."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _prctl(option: int, value: int) -> None:
    """Calls prctl(2). Ignores a failure, because the options are not essential."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Keeper:
    """Starts, watches and stops the servers of one folder. `names` has the running servers by pid."""

    def __init__(self, folder: Path, owner: ProcessIdentity | None) -> None:
        self.folder = folder
        self.owner = owner
        self.names: dict[int, str] = {}
        self.identities: dict[int, ProcessIdentity] = {}
        self.exited: dict[str, int] = {}

    def run(self) -> None:
        """Starts and watches the servers. Stops them at SIGTERM or SIGINT, or when the process that needs them
        exits."""
        self.record()
        self.serve()
        self.stop(OWNED_STOP_SECONDS if self.owner else STOP_SECONDS)
        (self.folder / "keeper.json").unlink(missing_ok=True)

    def serve(self) -> None:
        """Starts missing servers at each SIGHUP, and reaps children. Returns at SIGTERM, SIGINT or the owner's exit."""
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
        """Starts every server that has a file in the folder `plan` and is not running."""
        for path in sorted((self.folder / "plan").glob("*.json")):
            if path.stem not in self.names.values():
                self.start(path.stem, json.loads(path.read_text()))
        self.record()

    def start(self, name: str, plan: Plan) -> None:
        """Starts one server. If the keeper dies, the kernel sends the signal `plan["orphaned"]` to the server."""
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
        """Reaps children that have exited. Returns whether a server was among them."""
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
        """Writes keeper.json. If the keeper is killed, `Processes.stop` finds the servers with this file."""
        record: Record = {
            "keeper": list(identify(os.getpid()) or (os.getpid(), "")),
            "owner": list(self.owner or ()),
            "running": {name: list(self.identities[pid]) for pid, name in self.names.items()},
            "exited": self.exited,
        }
        replace_json(self.folder / "keeper.json", record)

    def stop(self, timeout_seconds: float) -> None:
        """Sends each server its stop signals, and after `timeout_seconds` kills every descendant that still runs."""
        for step in range(2):
            for pid, name in self.names.items():
                signals = json.loads((self.folder / "plan" / f"{name}.json").read_text())["stop"]
                for each in signals[step : step + 1]:
                    send(pid, signal.Signals[each])
            self.wait_until(lambda: not self.names, timeout_seconds / 2)
        self.wait_until(lambda: not descendants(os.getpid()), ORPHAN_STOP_SECONDS)
        while left := descendants(os.getpid()):
            for pid in left:
                send(pid, signal.SIGKILL)
            self.wait_until(lambda: not descendants(os.getpid()), 0.05)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Reaps children until `done` returns True, or for `seconds` at most."""
        deadline = time.monotonic() + seconds
        self.reap()
        while not done() and time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)
            self.reap()


def _become(plan: Plan, keeper: int) -> None:
    """Replaces this child process with the planned program (exec). Returns only if the keeper has died."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.Signals[plan["orphaned"]])
    if os.getppid() != keeper:
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    log = os.open(plan["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(plan["cwd"])
    os.execve(plan["argv"][0], plan["argv"], plan["env"])  # noqa: S606 - deliberately without a shell


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKING)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.chdir("/")
    os.umask(0o077)
    folder, *owner = sys.argv[1:]
    Keeper(Path(folder), ProcessIdentity(int(owner[0]), owner[1]) if owner else None).run()


if __name__ == "__main__":
    main()
