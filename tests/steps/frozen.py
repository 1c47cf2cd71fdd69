"""Workers that are frozen at every step of the protocol, past their leases, and woken at any moment after that.

    python -m tests.steps.frozen --freezes 200 --seed 1

What they had leased goes to others meanwhile; what they do when they wake must send nothing twice and spoil nothing.
The relay is frozen as well, between its look into a living ledger and its releases. Held may only be what was on the
wire at a freeze.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID

from rich.console import Console

from tests.acceptance.harness import Host, stop
from tests.steps.aims import WORKER_STEPS, Range
from tests.steps.proof import SETTINGS, Proof, count_unfinished, is_fed, own_host
from tests.supervisor.program import eventually

LEASE_SECONDS: Final = 1
SHORTEST_SECONDS: Final = 0.8
LONGEST_SECONDS: Final = 2.5
WORKERS_PER_RELAY: Final = 12
SECONDS_PER_FREEZE: Final = 10.0
"""Far above what it takes."""


@dataclass
class Waker:
    """Wakes whoever was frozen, after a time of its own."""

    kill_range: Range
    chance: random.Random
    _wake_at: dict[int, float] = field(default_factory=dict)
    woken: int = 0

    def look(self) -> bool:
        """Wakes whose time has come; true."""
        frozen = self.kill_range.kills()
        for number in range(len(self._wake_at), len(frozen)):
            self._wake_at[number] = time.monotonic() + self.chance.uniform(SHORTEST_SECONDS, LONGEST_SECONDS)
        for number, wake_at in self._wake_at.items():
            if 0 < wake_at <= time.monotonic():
                with suppress(ProcessLookupError):
                    os.kill(frozen[number].pid, signal.SIGCONT)
                self._wake_at[number] = 0
                self.woken += 1
        return True


def freeze(host: Host, *, freezes: int, seed: int) -> Proof:
    """Runs until so many processes were frozen and woken, and balances the books.

    Raises:
        AssertionError: they do not balance.
    """
    began_at = time.monotonic()
    folder = host.folder / "range"
    folder.mkdir()
    kill_range = Range(folder, seed)
    relays = freezes // (WORKERS_PER_RELAY + 1)
    kill_range.allow(freezes - relays, relays)
    host.sink("--latency-ms", "3")
    argv = [sys.executable, "-m", "tests.steps.program", str(folder), str(seed), "SIGSTOP"]
    settings = {**SETTINGS, "WORKERS": 5, "LEASE_SECONDS": LEASE_SECONDS}
    run = host.program(argv, "run", env=host.environment(**settings))
    enqueued: set[UUID] = set()
    numbers = itertools.count()
    waker = Waker(kill_range, random.Random(seed))
    eventually(
        lambda: is_fed(host, enqueued, numbers) and waker.look() and waker.woken >= freezes,
        lambda: f"{freezes} freezes ({waker.woken} so far)",
        seconds=freezes * SECONDS_PER_FREEZE,
    )
    eventually(lambda: count_unfinished(host) == 0, "the end of all emails")
    stop(run)
    proof = Proof(kill_range.kills(), host.books(enqueued), enqueued, seconds=time.monotonic() - began_at)
    # An email that was held may have been proved sent after its dead letter.
    proof.assert_harmless()
    return proof


def main() -> None:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.steps.frozen", description=summary, epilog=details)
    parser.add_argument("--freezes", type=int, default=200, metavar="N", help="how many; default: 200")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="draws the aims; default: 1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatcher-steps-") as folder, own_host(Path(folder)) as host:
        proof = freeze(host, freezes=options.freezes, seed=options.seed)
    console = Console()
    frozen = Counter(kill.step for kill in proof.kills)
    console.print({step.value: frozen[step] for step in (*WORKER_STEPS, *(frozen.keys() - set(WORKER_STEPS)))})
    console.print(
        f"{len(proof.enqueued)} emails {proof.books.counts}, duplicates {len(proof.books.duplicates)}, "
        f"lost {len(proof.books.lost)}, held in vain {len(proof.held_in_vain)}; "
        f"seed {options.seed}, {proof.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
