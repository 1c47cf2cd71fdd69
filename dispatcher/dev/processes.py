"""Starts, lists and stops the processes of one server folder, through their parent process, the `keeper`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dispatcher.dev import keeper
from dispatcher.dev.command import tail
from dispatcher.dev.keeper import Plan, ProcessIdentity, Record
from dispatcher.errors import ServerUnavailable

STOP_SECONDS = 20.0
POLL_SECONDS = 0.05
# The longest wait until keeper.json lists a new process. The wait needs a limit, because a process that exits
# immediately might never be listed.
LAUNCH_SECONDS = 2.0
LAUNCH_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of one server folder (an absolute path): the servers, and their parent process, the keeper."""

    folder: Path

    def spawn_keeper(self, owner_pid: int | None) -> None:
        """Starts the keeper, which later starts the servers as its children, and stops them when the process
        `owner_pid` exits; if None, when `stop` is called. Raises ServerUnavailable if the keeper did not start, or the
        owner has already exited."""
        shutil.rmtree(self.folder / "plan", ignore_errors=True)
        (self.folder / "plan").mkdir(mode=0o700)
        (self.folder / "log").mkdir(mode=0o700, exist_ok=True)
        owner: list[str] = []
        if owner_pid is not None:
            if (identity := keeper.identify(owner_pid)) is None:
                raise ServerUnavailable(f"process {owner_pid}, the owner of the private servers, has exited.")
            owner = [str(owner_pid), identity.started]
        log = self.folder / "log" / "keeper.log"
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", keeper.__file__, str(self.folder), *owner],
            {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            # The signals are blocked until the keeper waits for them. Otherwise, an early signal would kill the keeper.
            setsigmask=keeper.WAKING,
        )
        await_condition(
            lambda: (record := self.record()) is not None and record["keeper"][0] == pid,
            seconds=10,
            broken=lambda: f"the keeper exited immediately: {tail(log)}" if keeper.identify(pid) is None else None,
            what="the keeper of the private servers",
        )

    def launch(self, name: str, plan: Plan) -> None:
        """Makes the keeper start a server, or start it again after its exit. Waits until the server is listed in
        `running`, but not until it is ready."""
        keeper.replace_json(self.folder / "plan" / f"{name}.json", plan)
        if (identity := self.keeper()) is None:
            raise ServerUnavailable("the private servers were stopped during their start.")
        keeper.send(identity.pid, signal.SIGHUP)
        # Wait until the new process is listed. Before that, `exit_report` would report the exit of the old process.
        deadline = time.monotonic() + LAUNCH_SECONDS
        while name not in self.running() and time.monotonic() < deadline:
            time.sleep(LAUNCH_POLL_SECONDS)

    def keeper(self) -> ProcessIdentity | None:
        """The folder's keeper (the servers' parent process); None if no keeper is running."""
        record = self.record()
        return _living(record["keeper"]) if record else None

    def is_abandoned(self) -> bool:
        """Whether the process that owns the servers has exited. If so, the keeper is about to stop the servers."""
        record = self.record()
        if record is None or not record.get("owner"):
            return False
        return _living(record["owner"]) is None

    def running(self) -> dict[str, int]:
        """The pids of the running servers, by name."""
        record = self.record()
        living = {name: _living(entry) for name, entry in (record["running"] if record else {}).items()}
        return {name: identity.pid for name, identity in living.items() if identity}

    def exit_report(self, name: str) -> str | None:
        """Why a server has exited, with its exit code and the end of its log; None if it has not."""
        log = self.folder / "log" / f"{name}.log"
        record = self.record()
        if record is None or self.keeper() is None:
            return "it was stopped during its start"
        if name not in record["exited"]:
            return None
        return f"it exited with code {record['exited'][name]}; the end of {log}:\n{tail(log)}"

    def stop(self) -> list[str]:
        """Stops every process of this folder and waits until all have exited. Idempotent. Returns the servers that were
        running."""
        record = self.record()
        if record is None:
            return []
        identities = {"keeper": record["keeper"], **record["running"]}
        living = {name: identity for name, entry in identities.items() if (identity := _living(entry))}
        family = _family(list(living.values()))
        if "keeper" in living:
            keeper.send(living["keeper"].pid, signal.SIGTERM)
            _await_exit(family, STOP_SECONDS)
        _kill(family)
        _reap(_identity(record["keeper"]))
        (self.folder / "keeper.json").unlink(missing_ok=True)
        return sorted(living.keys() - {"keeper"})

    def record(self) -> Record | None:
        """The content of keeper.json; None if no keeper was started, or the keeper has stopped cleanly."""
        try:
            record: Record = json.loads((self.folder / "keeper.json").read_text())
        except FileNotFoundError:
            return None
        return record


def await_condition(
    ready: Callable[[], bool], *, seconds: float, broken: Callable[[], str | None], what: str, log: Path | None = None
) -> None:
    """Waits until a condition is true. Raises ServerUnavailable, with the last lines of the log, if the time is over,
    or if `broken` returns why the condition can no longer become true."""
    deadline = time.monotonic() + seconds
    while not ready():
        if (reason := broken()) is not None:
            raise ServerUnavailable(f"{what} did not start: {reason}")
        if time.monotonic() > deadline:
            log_end = f" The end of {log}:\n{tail(log)}" if log else ""
            raise ServerUnavailable(f"{what} was not ready after {seconds:.0f} s.{log_end}")
        time.sleep(POLL_SECONDS)


def _living(entry: list[int | str]) -> ProcessIdentity | None:
    """The identity in an entry of keeper.json; None if that process is no longer running."""
    identity = _identity(entry)
    return identity if keeper.is_alive(identity) else None


def _identity(entry: list[int | str]) -> ProcessIdentity:
    return ProcessIdentity(int(entry[0]), str(entry[1]))


def _family(heads: list[ProcessIdentity]) -> list[ProcessIdentity]:
    """These processes and all their descendants, without those that have exited."""
    pids = {pid for head in heads for pid in (head.pid, *keeper.descendants(head.pid))}
    return [identity for pid in sorted(pids) if (identity := keeper.identify(pid))]


def _await_exit(family: list[ProcessIdentity], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(keeper.is_alive, family)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _kill(family: list[ProcessIdentity]) -> None:
    """Kills the processes that are still running, with all their descendants. Waits until all of them have exited."""
    while living := _family([identity for identity in family if keeper.is_alive(identity)]):
        for identity in living:
            keeper.send(identity.pid, signal.SIGKILL)
        _await_exit(living, 1)


def _reap(dead: ProcessIdentity) -> None:
    """Reaps the dead keeper if this process is its parent. Otherwise it would stay a zombie until this process
    exits."""
    if keeper.identify(dead.pid, even_a_zombie=True) == dead:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(dead.pid, 0)
