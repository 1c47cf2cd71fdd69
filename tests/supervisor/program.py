"""A program under test: a real process in a session of its own, its JSON log read as events, its children, its end."""

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

T = TypeVar("T")

DEADLINE_SECONDS: Final = 90.0
"""Far above what anything takes on a busy machine; nothing waits that long unless it is broken."""
LOOK_SECONDS: Final = 0.01
CHECKOUT: Final = Path(__file__).parents[2]

Event = dict[str, Any]


def eventually(
    condition: Callable[[], T | None],
    what: str | Callable[[], str] = "the condition",
    *,
    seconds: float = DEADLINE_SECONDS,
) -> T:
    """Waits until the condition gives something true, and returns that; fails when the time is over."""
    give_up_at = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > give_up_at:
            words = what if isinstance(what, str) else what()
            raise AssertionError(f"{words} did not come true within {seconds:g} s")
        time.sleep(LOOK_SECONDS)
    return value


@dataclass(frozen=True, slots=True)
class Entry:
    """One process in the kernel's table."""

    pid: int
    state: str
    parent: int
    session: int


def processes() -> list[Entry]:
    """All of them, zombies included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # It may end while we look.
            with suppress(OSError):
                state, parent, _group, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                found.append(Entry(int(folder.name), state, int(parent), int(session)))
    return found


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    return any(entry.pid == pid and entry.state not in "ZX" for entry in processes())


class Program:
    """One started process and everything that it starts.

    Attributes:
        pid: Its id, and its session's.
    """

    def __init__(
        self, argv: Sequence[str], folder: Path, name: str, *, env: Mapping[str, str], stdout: Path | None = None
    ) -> None:
        """Starts it at once.

        Args:
            folder: For what it says: `name.log` and `name.err`.
            env: Its whole environment.
            stdout: Where its log goes instead; there are no events then.
        """
        self._log_path = folder / f"{name}.log"
        self._words_path = folder / f"{name}.err"
        self._read_octets = 0
        self._events: list[Event] = []
        self._log_path.touch()
        with (stdout or self._log_path).open("wb") as log, self._words_path.open("wb") as words:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=words,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def words(self) -> str:
        """What it said on stderr."""
        return self._words_path.read_text(errors="replace")

    @property
    def log(self) -> str:
        """What it said on stdout."""
        return self._log_path.read_text(errors="replace")

    def events(self, name: str, **fields: object) -> list[Event]:
        """Its log's events of that name so far, oldest first, of those whose fields are as given."""
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
        """Waits for so many such events, and returns the last of these."""

        def found() -> list[Event]:
            events = self.events(name, **fields)
            assert len(events) >= count or self.exit_code is None, self._account(f"it ended before {name}")
            return events[:count] if len(events) >= count else []

        return eventually(found, lambda: self._account(f"{count} x {name} {fields}"), seconds=seconds)[-1]

    def pid_of(self, role: str) -> int:
        """The process that has this role now; waits until there is one."""

        def living() -> int:
            started = [event["pid"] for event in self.events("process.started", role=role)]
            ended = {event["pid"] for event in self.events("process.exited", role=role)}
            return started[-1] if started and started[-1] not in ended else 0

        return eventually(living, lambda: self._account(f"a process for {role}"))

    def children(self) -> list[int]:
        """Its direct children, zombies included, as the kernel sees them."""
        # A thousand times faster than a look at all processes, where the kernel offers it.
        with suppress(FileNotFoundError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return [entry.pid for entry in processes() if entry.parent == self.pid]

    def members(self) -> list[int]:
        """Whoever lives of its session, orphans included."""
        return [entry.pid for entry in processes() if entry.session == self.pid and entry.state not in "ZX"]

    def send(self, number: signal.Signals) -> None:
        """Signals the process itself."""
        os.kill(self.pid, number)

    def send_to(self, pid: int, number: signal.Signals) -> None:
        """Signals one that it started."""
        os.kill(pid, number)

    def freeze_all(self, *, seconds: float) -> None:
        """Lets everybody of its session stand still for so long, as a host that is suspended does."""
        members = self.members()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in members:
                os.kill(pid, number)
            # Time itself is what is tested here.
            time.sleep(seconds if number is signal.SIGSTOP else 0)

    def send_all(self, number: signal.Signals) -> None:
        """Signals its whole process group, as a terminal does."""
        os.killpg(self.pid, number)

    def await_exit(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Waits for its end; returns how it ended."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._account(f"it did not end within {seconds:g} s")) from None

    def await_all_gone(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Waits until nobody of its session lives."""
        eventually(
            lambda: not self.members(), lambda: self._account(f"processes {self.members()} live on;"), seconds=seconds
        )

    def destroy(self) -> None:
        """Kills whatever is left of the session; for the end of a test, whatever happened in it."""
        while members := self.members():
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
        self._process.wait()

    def _account(self, what: str) -> str:
        return f"{what}\n--- the end of stdout\n{self.log[-3000:]}\n--- the end of stderr\n{self.words[-3000:]}\n---"
