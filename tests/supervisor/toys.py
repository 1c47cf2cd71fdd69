"""A parent whose children are toys, as a program of its own: python -m tests.supervisor.toys FOLDER DRAIN_SECONDS ROLE…

A role is NAME=KIND, NAME=KIND:ARGUMENT or, for several of it, NAME*COUNT=KIND; those named `relay` and `monitor` stop
last, those named `eager…` are started again without a wait, those named `patient…` that could not boot in an hour. Each
toy writes what happens to it into FOLDER/diary, a line each: name, pid, word. `escaped` stands there if a child runs on
into its parent's code. A reload takes the roles from FOLDER/roles, where that exists; an empty one is a mistake.

    serve[:seconds]   drains for so long when it is told to stop, by signal or lifeline, and exits 0
    signal            listens to SIGTERM alone
    lifeline          listens to its lifeline alone
    deaf              listens to nothing
    exit:code         ends at once
    chat              says something on stdout and ends at once
    raise             ends by an exception
    abort             ends by a signal
    unfit:code        ends before it is up
    mistaken          ends before it is up, because of its settings
    killed, full, refused, away, broken   the same by a signal, a full disk, a server's no, one away, our mistake
    hang              stands still once its loop has begun
    retire            serves, and wants a successor
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
from pathlib import Path

from dispatcher.errors import ConfigurationError, StoreRefused, StoreUnavailable
from dispatcher.host.lifecycle import stop_event
from dispatcher.host.process_table import ChildContext
from dispatcher.supervisor.parent import Parent
from dispatcher.supervisor.restarts import BOOTS, Restarts
from dispatcher.supervisor.supervised import Role
from dispatcher.telemetry import log

FAILING_FORKS = "TOYS_FAILING_FORKS"
"""How many forks fail at first, as they do on a host that is short of processes."""
HANG_SECONDS = "TOYS_HANG_SECONDS"
"""How long a toy may stand still; for ever where it is not set."""


@dataclass(frozen=True, slots=True)
class Eager(Restarts):
    """No wait, ever: to see hundreds of restarts in a second."""

    @property
    def wait_seconds(self) -> float:
        """None."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Patient(Restarts):
    """A wait that nobody sees the end of."""

    @property
    def wait_seconds(self) -> float:
        """An hour."""
        return 3600.0


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


def serve(toy: Toy, context: ChildContext) -> int:
    """Works until told to stop, as our processes do."""

    async def work() -> None:
        stop = stop_event(context)
        # Before the parent knows: from then on it may stop a predecessor, and the diary tells who was there when.
        toy.note("serving")
        context.process_slot.mark_up()
        await stop.wait()
        toy.note("stopping")
        await asyncio.sleep(float(toy.argument or 0))

    asyncio.run(work())
    # One that comes late, as the kernel's may where the lifeline was faster: it must not end us before we have ended.
    signal.raise_signal(signal.SIGTERM)
    toy.note("stopped")
    return 0


def hear_signal(toy: Toy, _context: ChildContext) -> int:
    """Stops by SIGTERM alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    toy.note("serving")
    signal.sigwait({signal.SIGTERM})
    toy.note("stopped")
    return 0


def hear_lifeline(toy: Toy, context: ChildContext) -> int:
    """Stops by the lifeline alone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.note("serving")
    assert os.read(context.lifeline, 1) == b""
    toy.note("stopped")
    return 0


def be_deaf(toy: Toy, _context: ChildContext) -> int:
    """Never stops."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.note("serving")
    while True:
        select.select([], [], [])


def end(toy: Toy, _context: ChildContext) -> int:
    """Ends at once."""
    toy.note(f"descriptors={len(list(Path('/proc/self/fd').iterdir()))}")
    return int(toy.argument)


def chat(toy: Toy, _context: ChildContext) -> int:
    """Ends with words that nobody has read yet."""
    toy.note("chatted")
    sys.stdout.write("hello\n")
    return 0


def fail(_toy: Toy, _context: ChildContext) -> int:
    """Ends by an exception."""
    raise RuntimeError("a toy broke")


def abort(_toy: Toy, _context: ChildContext) -> int:
    """Ends by a signal."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def be_mistaken(_toy: Toy, _context: ChildContext) -> int:
    """Ends by a mistake in its settings."""
    raise ConfigurationError(["TOY_SIZE must be a whole number.", "TOY_COLOUR is not set."])


def hang(toy: Toy, context: ChildContext) -> int:
    """Its loop begins, and then stands still."""

    async def stand_still() -> None:
        stop_event(context)
        context.process_slot.mark_up()
        toy.note("serving")
        select.select([], [], [])

    asyncio.run(stand_still())
    return 0


def retire(toy: Toy, context: ChildContext) -> int:
    """Serves, and wants to be replaced."""
    context.process_slot.ask_for_successor()
    return serve(toy, context)


def kill_itself(_toy: Toy, _context: ChildContext) -> int:
    """Dies of a signal."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def lack_room(_toy: Toy, _context: ChildContext) -> int:
    """Ends because a disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/private/file")


def be_refused(_toy: Toy, _context: ChildContext) -> int:
    """Ends because a server does not let it in."""
    raise ConfigurationError(["no entry for the user private"]) from StoreRefused("no entry for the user private")


def be_cut_off(_toy: Toy, _context: ChildContext) -> int:
    """Ends because a server is away."""
    raise StoreUnavailable("no connection to private as private")


def be_broken(_toy: Toy, _context: ChildContext) -> int:
    """Ends by a mistake of ours."""
    raise LookupError("private")


UNFIT: dict[str, Callable[[Toy, ChildContext], int]] = {
    "unfit": end,
    "mistaken": be_mistaken,
    "killed": kill_itself,
    "full": lack_room,
    "refused": be_refused,
    "away": be_cut_off,
    "broken": be_broken,
}
"""These end before they are up."""
KINDS: dict[str, Callable[[Toy, ChildContext], int]] = {
    "serve": serve,
    "signal": hear_signal,
    "lifeline": hear_lifeline,
    "deaf": be_deaf,
    "exit": end,
    "chat": chat,
    "raise": fail,
    "abort": abort,
    "hang": hang,
    "retire": retire,
}


def role(text: str, folder: Path) -> Role:
    """The role that an argument describes."""
    title, _, rest = text.partition("=")
    kind, _, argument = rest.partition(":")
    name, _, times = title.partition("*")
    toy = Toy(name, argument, folder / "diary")

    def run(context: ChildContext) -> int:
        if kind in UNFIT:
            return UNFIT[kind](toy, context)
        # A loop is up when it works; the others are at once.
        if kind not in ("serve", "retire", "hang"):
            context.process_slot.mark_up()
        return KINDS[kind](toy, context)

    return Role(name, run, int(times) if times else None, name in ("relay", "monitor"), *waits_of(name))


def waits_of(name: str) -> tuple[Restarts, Restarts]:
    """How long a role waits after an end, by its name."""
    if name.startswith("eager"):
        return Eager(), Eager()
    return Restarts(), Patient() if name.startswith("patient") else BOOTS


def load_roles(first: list[str], folder: Path) -> list[Role]:
    """The roles at the start, or those of the file that came since."""
    path = folder / "roles"
    texts = path.read_text().split() if path.exists() else first
    if not texts:
        raise ConfigurationError(["TOY_ROLES is empty."])
    return [role(text, folder) for text in texts]


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
        [role(text, Path(folder)) for text in roles],
        run_dir=Path(folder) / "run",
        drain_seconds=float(drain_seconds),
        hang_seconds=float(os.environ.get(HANG_SECONDS, "0")),
        metrics_folder=Path(folder) / "metrics",
        counts=False,
        load_roles=lambda: load_roles(roles, Path(folder)),
    )
    pid = os.getpid()
    try:
        return parent.run()
    finally:
        if os.getpid() != pid:
            Toy("child", "", Path(folder) / "diary").note("escaped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
