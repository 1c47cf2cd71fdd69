"""The processes of one server folder, seen from outside: here one has the keeper start, describe and end them."""

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
LAUNCH_SECONDS = 2.0  # a process that ends at once may never be seen to run
LAUNCH_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Processes:
    """The keeper of a folder and the servers under it.

    Attributes:
        folder: The server folder; absolute.
    """

    folder: Path

    def spawn_keeper(self, owner_pid: int | None) -> None:
        """Start a keeper that lives as long as the owner does, or until `stop` when there is none.

        Raises:
            ServerUnavailable: It did not come up, or the owner is gone already.
        """
        shutil.rmtree(self.folder / "plan", ignore_errors=True)
        (self.folder / "plan").mkdir(mode=0o700)
        (self.folder / "log").mkdir(mode=0o700, exist_ok=True)
        owner: list[str] = []
        if owner_pid is not None:
            if (identity := keeper.identify(owner_pid)) is None:
                raise ServerUnavailable(f"process {owner_pid}, which should own the private servers, is gone.")
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
            setsigmask=keeper.WAKING,  # blocked from birth: a signal sent at once waits instead of killing
        )
        await_condition(
            lambda: (record := self.record()) is not None and record["keeper"][0] == pid,
            seconds=10,
            broken=lambda: f"its keeper died at once: {tail(log)}" if keeper.identify(pid) is None else None,
            what="the keeper of the private servers",
        )

    def launch(self, name: str, plan: Plan) -> None:
        """Have the keeper start a process; returns when it has. A second call after it ended starts it again.

        Raises:
            ServerUnavailable: There is no keeper (any more).
        """
        keeper.replace_json(self.folder / "plan" / f"{name}.json", plan)
        if (identity := self.keeper()) is None:
            raise ServerUnavailable("the private servers were stopped while they started.")
        keeper.send(identity.pid, signal.SIGHUP)
        # Until then the record has the end of the process before, which `exit_report` would report for the new one.
        deadline = time.monotonic() + LAUNCH_SECONDS
        while name not in self.running() and time.monotonic() < deadline:
            time.sleep(LAUNCH_POLL_SECONDS)

    def keeper(self) -> ProcessIdentity | None:
        """The living keeper of this folder; None if there is none."""
        record = self.record()
        return _living(record["keeper"]) if record else None

    def is_abandoned(self) -> bool:
        """Whether there was an owner who is gone, so that the servers are about to go, too."""
        record = self.record()
        if record is None or not record.get("owner"):
            return False
        return _living(record["owner"]) is None

    def running(self) -> dict[str, int]:
        """Pids of the servers that run now, by name."""
        record = self.record()
        living = {name: _living(entry) for name, entry in (record["running"] if record else {}).items()}
        return {name: identity.pid for name, identity in living.items() if identity}

    def exit_report(self, name: str) -> str | None:
        """How the server ended, with the last words of its log; None while it lives or has not started yet."""
        log = self.folder / "log" / f"{name}.log"
        record = self.record()
        if record is None or self.keeper() is None:
            return "it was stopped while it started"
        if name not in record["exited"]:
            return None
        return f"it ended with exit code {record['exited'][name]}; the end of {log}:\n{tail(log)}"

    def stop(self) -> list[str]:
        """End every process of this folder and wait until all are gone; harmless when nothing runs.

        Returns the names of those that ran.
        """
        record = self.record()
        if record is None:
            return []
        identities = {"keeper": record["keeper"], **record["running"]}
        living = {name: identity for name, entry in identities.items() if (identity := _living(entry))}
        family = _family(list(living.values()))
        if "keeper" in living:
            keeper.send(living["keeper"].pid, signal.SIGTERM)
            _await_end(family, STOP_SECONDS)
        _kill(family)
        _reap(_identity(record["keeper"]))
        (self.folder / "keeper.json").unlink(missing_ok=True)
        return sorted(living.keys() - {"keeper"})

    def record(self) -> Record | None:
        """What the keeper wrote last; None if it never did, or ended in order."""
        try:
            record: Record = json.loads((self.folder / "keeper.json").read_text())
        except FileNotFoundError:
            return None
        return record


def await_condition(
    ready: Callable[[], bool], *, seconds: float, broken: Callable[[], str | None], what: str, log: Path | None = None
) -> None:
    """Returns once the condition holds.

    Raises:
        ServerUnavailable: The time is over, or `broken` said why it will never hold.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if (reason := broken()) is not None:
            raise ServerUnavailable(f"{what} did not start: {reason}")
        if time.monotonic() > deadline:
            words = f" The end of {log}:\n{tail(log)}" if log else ""
            raise ServerUnavailable(f"{what} was not ready after {seconds:.0f} s.{words}")
        time.sleep(POLL_SECONDS)


def _living(entry: list[int | str]) -> ProcessIdentity | None:
    """The identity as recorded, if that very process still runs."""
    identity = _identity(entry)
    return identity if keeper.is_alive(identity) else None


def _identity(entry: list[int | str]) -> ProcessIdentity:
    """An identity as it was recorded."""
    return ProcessIdentity(int(entry[0]), str(entry[1]))


def _family(heads: list[ProcessIdentity]) -> list[ProcessIdentity]:
    """These processes and all that descend from them, as far as they live."""
    pids = {pid for head in heads for pid in (head.pid, *keeper.descendants(head.pid))}
    return [identity for pid in sorted(pids) if (identity := keeper.identify(pid))]


def _await_end(family: list[ProcessIdentity], seconds: float) -> None:
    """Wait until all are gone, or the time is over."""
    deadline = time.monotonic() + seconds
    while any(map(keeper.is_alive, family)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _kill(family: list[ProcessIdentity]) -> None:
    """SIGKILL whoever still lives, children born meanwhile included, and wait for their end."""
    while living := _family([identity for identity in family if keeper.is_alive(identity)]):
        for identity in living:
            keeper.send(identity.pid, signal.SIGKILL)
        _await_end(living, 1)


def _reap(dead: ProcessIdentity) -> None:
    """Collect the exit status of the keeper if it was our child; otherwise a zombie would stay as long as we do."""
    if keeper.identify(dead.pid, even_a_zombie=True) == dead:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(dead.pid, 0)
