"""A parent whose children are toys, as a program of its own: python -m tests.supervisor.toys FOLDER DRAIN_SECONDS ROLE…

A role is NAME=KIND or NAME=KIND:ARGUMENT; the one named `relay` stops last, those named `eager…` are started again
without a wait. Each toy writes what happens to it into FOLDER/diary, a line each: name, pid, word. `escaped` stands
there if a child runs on into its parent's code.

    serve[:seconds]   drains for so long when it is told to stop, by signal or lifeline, and exits 0
    signal            listens to SIGTERM alone
    lifeline          listens to its lifeline alone
    deaf              listens to nothing
    exit:code         ends at once
    chat              says something on stdout and ends at once
    raise             ends by an exception
    abort             ends by a signal
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dispatcher.stopping import stop_event
from dispatcher.supervisor.parent import Parent, Role
from dispatcher.supervisor.restarts import Restarts
from dispatcher.telemetry import log

FAILING_FORKS = "TOYS_FAILING_FORKS"
"""How many forks fail at first, as they do on a host that is short of processes."""


@dataclass(frozen=True, slots=True)
class Eager(Restarts):
    """No wait, ever: to see hundreds of restarts in a second."""

    def after(self, lived_seconds: float) -> Restarts:  # noqa: ARG002 - as it is called
        """Unchanged."""
        return self

    @property
    def wait_seconds(self) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Toy:
    """What a toy knows about itself."""

    name: str
    argument: str
    diary: Path

    def note(self, word: str) -> None:
        """Writes a line into the diary."""
        with self.diary.open("ab", buffering=0) as file:
            file.write(f"{self.name} {os.getpid()} {word}\n".encode())


def serve(toy: Toy, lifeline: int) -> int:
    """Works until told to stop, as our processes do."""

    async def work() -> None:
        stop = stop_event(lifeline)
        toy.note("serving")
        await stop.wait()
        toy.note("stopping")
        await asyncio.sleep(float(toy.argument or 0))

    asyncio.run(work())
    toy.note("stopped")
    return 0


def hear_signal(toy: Toy, _lifeline: int) -> int:
    """Stops by SIGTERM alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    toy.note("serving")
    signal.sigwait({signal.SIGTERM})
    toy.note("stopped")
    return 0


def hear_lifeline(toy: Toy, lifeline: int) -> int:
    """Stops by the lifeline alone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.note("serving")
    assert os.read(lifeline, 1) == b""
    toy.note("stopped")
    return 0


def be_deaf(toy: Toy, _lifeline: int) -> int:
    """Never stops."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.note("serving")
    while True:
        select.select([], [], [])


def end(toy: Toy, _lifeline: int) -> int:
    """Ends at once."""
    toy.note(f"descriptors={len(list(Path('/proc/self/fd').iterdir()))}")
    return int(toy.argument)


def chat(toy: Toy, _lifeline: int) -> int:
    """Ends with words that nobody has read yet."""
    toy.note("chatted")
    sys.stdout.write("hello\n")
    return 0


def fail(_toy: Toy, _lifeline: int) -> int:
    """Ends by an exception."""
    raise RuntimeError("a toy broke")


def abort(_toy: Toy, _lifeline: int) -> int:
    """Ends by a signal."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


KINDS: dict[str, Callable[[Toy, int], int]] = {
    "serve": serve,
    "signal": hear_signal,
    "lifeline": hear_lifeline,
    "deaf": be_deaf,
    "exit": end,
    "chat": chat,
    "raise": fail,
    "abort": abort,
}


def role(text: str, folder: Path) -> Role:
    """The role that an argument describes."""
    name, _, rest = text.partition("=")
    kind, _, argument = rest.partition(":")
    toy = Toy(name, argument, folder / "diary")
    restarts = Eager() if name.startswith("eager") else Restarts()
    return Role(name, partial(KINDS[kind], toy), stops_last=name == "relay", restarts=restarts)


def forking(failures: int) -> Callable[[], int]:
    """A fork that fails so often, then works."""
    fork, calls = os.fork, itertools.count()

    def fork_perhaps() -> int:
        if next(calls) < failures:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    return fork_perhaps


def main(arguments: list[str]) -> int:
    """The command line."""
    folder, drain_seconds, *roles = arguments
    os.fork = forking(int(os.environ.get(FAILING_FORKS, "0")))
    log.configure("info", "json")
    parent = Parent(
        [role(text, Path(folder)) for text in roles], run_dir=Path(folder) / "run", drain_seconds=float(drain_seconds)
    )
    pid = os.getpid()
    try:
        return parent.run()
    finally:
        if os.getpid() != pid:
            Toy("child", "", Path(folder) / "diary").note("escaped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
