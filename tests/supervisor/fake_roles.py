"""Runs a parent with fake roles: python -m tests.supervisor.fake_roles FOLDER OPTIONS ROLE…

OPTIONS is a JSON object with `drain_seconds`, `hang_seconds` (0: unlimited), and `failing_forks`: the number of forks
that fail at first, as on a host that is short of processes.

A role is NAME=KIND, NAME=KIND:ARGUMENT, or NAME*COUNT=KIND for several processes. Roles named `relay` and `monitor`
stop last. Roles named `eager…` are restarted without a wait, and roles named `patient…` wait an hour after a failed
boot. Each process writes its events into FOLDER/diary, one per line: name, pid, word. The word `escaped` means that a
child returned into its parent's code. A reload reads the roles from FOLDER/roles, if that file exists; an empty file is
invalid.

    serve[:seconds]   on SIGTERM or lifeline EOF, drains for this long and exits 0
    ends              serves, and notes when the parent has reaped another process
    signal            reacts to SIGTERM only
    lifeline          reacts to its lifeline only
    deaf              reacts to nothing
    exit:code         prints to stdout and exits immediately
    raise             raises an exception
    abort             kills itself with SIGKILL
    hang              hangs once its loop has started
    retire            serves, and asks to be replaced
    unfit:code        exits before it is up
    killed, mistaken, full, refused, away, broken   exit before they are up: because of a signal, of their settings, a
    full disk, a refused login, an unreachable server, a bug
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dispatcher.domain.values import dataclass
from dispatcher.errors import ConfigurationError, StoreRefused, StoreUnavailable
from dispatcher.host.lifecycle import set_on_signals, stop_event
from dispatcher.host.process_table import ChildContext
from dispatcher.supervisor.parent import Parent
from dispatcher.supervisor.supervised import BOOTS, Restarts, Role
from dispatcher.telemetry import log

EAGER = Restarts(first_wait_seconds=0.0)
"""Restarts without a wait, so that a test sees hundreds of restarts per second."""


@dataclass(frozen=True, slots=True)
class Patient(Restarts):
    """Restarts after a wait that is longer than any test."""

    @property
    def wait_seconds(self) -> float:
        return 3600.0


@dataclass(frozen=True, slots=True)
class FakeProcess:
    name: str
    argument: str
    diary: Path

    def note(self, word: str) -> None:
        with self.diary.open("ab", buffering=0) as file:
            file.write(f"{self.name} {os.getpid()} {word}\n".encode())


def serve(toy: FakeProcess, context: ChildContext) -> int:
    """Run until stopped, like our real processes."""

    async def work() -> None:
        stop = stop_event(context)
        # Write to the diary before the parent sees that this process is up. The parent may then stop the predecessor,
        # which writes to the diary, too, and the lines must have the true order.
        toy.note("serving")
        context.process_slot.mark_up()
        await stop.wait()
        toy.note("stopping")
        await asyncio.sleep(float(toy.argument or 0))

    asyncio.run(work())
    # When the parent dies, the kernel closes the lifeline and sends SIGTERM. SIGTERM may arrive only after this process
    # has begun to drain. Raise such a late SIGTERM here: it must not kill this process.
    signal.raise_signal(signal.SIGTERM)
    toy.note("stopped")
    return 0


def note_ends(toy: FakeProcess, context: ChildContext) -> int:
    """Write a line when the parent has reaped another process, as the relay then settles a ledger."""

    async def work() -> None:
        stop, reaped = stop_event(context), asyncio.Event()
        set_on_signals(reaped, signal.SIGURG)
        toy.note("serving")
        await reaped.wait()
        toy.note("woken")
        await stop.wait()

    asyncio.run(work())
    return 0


def obey_signal(toy: FakeProcess, _context: ChildContext) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    toy.note("serving")
    signal.sigwait({signal.SIGTERM})
    toy.note("stopped")
    return 0


def obey_lifeline(toy: FakeProcess, context: ChildContext) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.note("serving")
    assert os.read(context.lifeline, 1) == b""
    toy.note("stopped")
    return 0


def ignore_everything(toy: FakeProcess, _context: ChildContext) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.note("serving")
    while True:
        select.select([], [], [])


def end(toy: FakeProcess, _context: ChildContext) -> int:
    """Exit while output may still be in the buffer."""
    toy.note(f"descriptors={len(list(Path('/proc/self/fd').iterdir()))}")
    sys.stdout.write("hello\n")
    return int(toy.argument)


def kill_itself(_toy: FakeProcess, _context: ChildContext) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hang(toy: FakeProcess, context: ChildContext) -> int:
    async def block() -> None:
        stop_event(context)
        context.process_slot.mark_up()
        toy.note("serving")
        select.select([], [], [])

    asyncio.run(block())
    return 0


def retire(toy: FakeProcess, context: ChildContext) -> int:
    context.process_slot.ask_for_successor()
    return serve(toy, context)


def failing(error: Exception, cause: Exception | None = None) -> Callable[[FakeProcess, ChildContext], int]:
    def fail(_toy: FakeProcess, _context: ChildContext) -> int:
        raise error from cause

    return fail


KINDS: dict[str, Callable[[FakeProcess, ChildContext], int]] = {
    "serve": serve,
    "ends": note_ends,
    "signal": obey_signal,
    "lifeline": obey_lifeline,
    "deaf": ignore_everything,
    "exit": end,
    "raise": failing(RuntimeError("a fake role failed")),
    "abort": kill_itself,
    "hang": hang,
    "retire": retire,
    "unfit": end,
    "killed": kill_itself,
    "mistaken": failing(ConfigurationError(["TOY_SIZE must be a whole number.", "TOY_COLOUR is not set."])),
    "full": failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/private/file")),
    "refused": failing(ConfigurationError(["no entry for the user private"]), StoreRefused("no entry for private")),
    "away": failing(StoreUnavailable("no connection to private as private")),
    "broken": failing(LookupError("private")),
}
NOT_UP_AT_ONCE = {"serve", "retire", "hang", "unfit", "killed", "mistaken", "full", "refused", "away", "broken"}
"""Roles that are up when their loop runs, or never. All other roles have no loop, and are up immediately."""


def role(text: str, folder: Path) -> Role:
    title, _, rest = text.partition("=")
    kind, _, argument = rest.partition(":")
    name, _, times = title.partition("*")
    toy = FakeProcess(name, argument, folder / "diary")

    def run(context: ChildContext) -> int:
        if kind not in NOT_UP_AT_ONCE:
            context.process_slot.mark_up()
        return KINDS[kind](toy, context)

    # The waits before a restart: after an exit, and after a failed boot.
    waits = (EAGER, EAGER) if name.startswith("eager") else (Restarts(), BOOTS)
    if name.startswith("patient"):
        waits = (Restarts(), Patient())
    return Role(name, run, int(times) if times else None, name in ("relay", "monitor"), *waits)


def load_roles(folder: Path, first: list[str]) -> list[Role]:
    path = folder / "roles"
    texts = path.read_text().split() if path.exists() else first
    if not texts:
        raise ConfigurationError(["TOY_ROLES is empty."])
    return [role(text, folder) for text in texts]


def forking(failures: int) -> Callable[[], int]:
    fork, calls = os.fork, itertools.count()

    def fork_or_fail() -> int:
        if next(calls) < failures:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    return fork_or_fail


def main(arguments: list[str]) -> int:
    named, given, *roles = arguments
    folder, options = Path(named), json.loads(given)
    os.fork = forking(options["failing_forks"])
    log.configure("info", "json")
    parent = Parent(
        [role(text, folder) for text in roles],
        run_dir=folder / "run",
        drain_seconds=options["drain_seconds"],
        hang_seconds=options["hang_seconds"],
        metrics_folder=folder / "metrics",
        counts=False,
        load_roles=partial(load_roles, folder, roles),
    )
    pid = os.getpid()
    try:
        return parent.run()
    finally:
        if os.getpid() != pid:
            FakeProcess("child", "", folder / "diary").note("escaped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
