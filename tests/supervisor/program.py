"""Runs a program under test as a real process in its own session. Reads its JSON log as events, lists its children, and
waits for its exit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from tests import preloaded

T = TypeVar("T")

DEADLINE_SECONDS: Final = 90.0
"""Far longer than anything takes on a busy machine. A wait that reaches this timeout shows a bug."""
LOOK_SECONDS: Final = 0.01
CHECKOUT: Final = preloaded.CHECKOUT

Event = dict[str, Any]


def eventually(
    condition: Callable[[], T | None],
    what: str | Callable[[], str] = "the condition",
    *,
    seconds: float = DEADLINE_SECONDS,
) -> T:
    """Wait until the condition returns a true value, and return that value. Fails after the timeout.

    A condition that takes long to check is checked less often, because the checks take the CPU from the program under
    test.
    """
    give_up_at = (checked_at := time.monotonic()) + seconds
    while not (value := condition()):
        now = time.monotonic()
        if now > give_up_at:
            words = what if isinstance(what, str) else what()
            raise AssertionError(f"timed out after {seconds:g} s, waiting for {words}")
        time.sleep(max(LOOK_SECONDS, 3 * (now - checked_at)))
        checked_at = time.monotonic()
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    pid: int
    state: str
    parent: int
    session: int


def processes() -> list[Entry]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # The process may exit while this loop reads its entry.
            with suppress(OSError):
                state, parent, _group, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                found.append(Entry(int(folder.name), state, int(parent), int(session)))
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not count."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Program:
    """A started process and all of its descendants."""

    def __init__(
        self, argv: Sequence[str], folder: Path, name: str, *, env: Mapping[str, str], stdout: Path | None = None
    ) -> None:
        """Start the program. Its output is in `folder`. If `stdout` is given, `events` finds nothing."""
        self._log_path = folder / f"{name}.log"
        self._words_path = folder / f"{name}.err"
        self._read_octets = 0
        self._events: list[Event] = []
        self._log_path.touch()
        with (stdout or self._log_path).open("wb") as log, self._words_path.open("wb") as words:
            self._process = preloaded.start(argv, env=env, stdout=log.fileno(), stderr=words.fileno())
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def words(self) -> str:
        return self._words_path.read_text(errors="replace")

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def events(self, name: str, **fields: object) -> list[Event]:
        with self._log_path.open("rb") as log:
            log.seek(self._read_octets)
            whole, found, _unfinished = log.read().rpartition(b"\n")
        if found:
            self._read_octets += len(whole) + 1
            self._events.extend(orjson.loads(line) for line in whole.splitlines() if line.startswith(b"{"))
        return [
            event
            for event in self._events
            if event["event"] == name and all(event.get(key) == value for key, value in fields.items())
        ]

    def await_events(self, name: str, count: int = 1, *, seconds: float = DEADLINE_SECONDS, **fields: object) -> Event:
        """Wait for the `count`-th event with this name and these fields, and return that event."""

        def found() -> list[Event]:
            events = self.events(name, **fields)
            assert len(events) >= count or self.exit_code is None, self._account(f"it exited before {name}")
            return events[:count] if len(events) >= count else []

        return eventually(found, lambda: self._account(f"{count} x {name} {fields}"), seconds=seconds)[-1]

    def pid_of(self, role: str) -> int:
        """The pid of the process that runs this role now. Waits until there is such a process."""

        def running() -> int:
            started = [event["pid"] for event in self.events("process.started", role=role)]
            ended = {event["pid"] for event in self.events("process.exited", role=role)}
            return started[-1] if started and started[-1] not in ended else 0

        return eventually(running, lambda: self._account(f"a process for {role}"))

    def children(self) -> list[int]:
        """The direct children, including zombies, as the kernel reports them."""
        # Some kernels do not have this file. Reading it is a thousand times faster than reading all processes.
        with suppress(FileNotFoundError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return [entry.pid for entry in processes() if entry.parent == self.pid]

    def members(self) -> list[int]:
        """Every running process of the session, including orphans."""
        return [entry.pid for entry in processes() if entry.session == self.pid and entry.state not in "ZX"]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def send_to(self, pid: int, number: signal.Signals) -> None:
        os.kill(pid, number)

    def freeze_all(self, *, seconds: float) -> None:
        """Freeze every process of the session for this time, like a suspended host."""
        members = self.members()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in members:
                os.kill(pid, number)
            # This wait has a fixed length, because the test is about the passing of time.
            time.sleep(seconds if number is signal.SIGSTOP else 0)

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to the process group, like a terminal does."""
        os.killpg(self.pid, number)

    def await_exit(self, seconds: float = DEADLINE_SECONDS) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._account(f"the program did not exit within {seconds:g} s")) from None

    def await_all_ended(self, seconds: float = DEADLINE_SECONDS) -> None:
        eventually(lambda: not self.members(), lambda: self._account(f"the exit of {self.members()}"), seconds=seconds)

    def destroy(self) -> None:
        """Kill every remaining process of the session, at the end of each test."""
        while members := self.members():
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
        self._process.wait()

    def _account(self, what: str) -> str:
        return f"{what}\n--- the end of stdout\n{self.log[-3000:]}\n--- the end of stderr\n{self.words[-3000:]}\n---"
