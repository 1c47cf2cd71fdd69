"""Freezes workers at every step of the protocol until their leases have expired, and wakes them at random times.

    python -m tests.steps.frozen --freezes 200 --seed 1

Meanwhile, other workers get the expired leases. After waking, a worker must send no email twice and break no guarantee.
The relay is also frozen, after it has read a live worker's ledger and before it releases leases. Only emails that were
on the wire at a freeze may be held.
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
from tests.steps.kill_points import WORKER_STEPS, KillPlan
from tests.steps.proof import SETTINGS, Proof, count_unfinished, is_fed, own_host
from tests.supervisor.program import eventually

LEASE_SECONDS: Final = 1
SHORTEST_SECONDS: Final = 0.8
LONGEST_SECONDS: Final = 2.5
WORKERS_PER_RELAY: Final = 12
SECONDS_PER_FREEZE: Final = 10.0
"""The time limit for one freeze, far longer than needed."""


@dataclass
class Waker:
    """Wakes frozen processes, each after a random time."""

    kill_plan: KillPlan
    chance: random.Random
    _wake_at: dict[int, float] = field(default_factory=dict)
    woken: int = 0

    def look(self) -> bool:
        """Wakes the processes that are due to wake; always returns True."""
        frozen = self.kill_plan.kills()
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
    """Freezes and wakes this number of processes during a run, then checks every email.

    Raises:
        AssertionError: An email was lost, duplicated or needlessly held.
    """
    began_at = time.monotonic()
    folder = host.folder / "range"
    folder.mkdir()
    kill_plan = KillPlan(folder, seed)
    relays = freezes // (WORKERS_PER_RELAY + 1)
    kill_plan.allow(freezes - relays, relays)
    host.sink("--latency-ms", "3")
    argv = [sys.executable, "-m", "tests.steps.program", str(folder), str(seed), "SIGSTOP"]
    settings = {**SETTINGS, "WORKERS": 5, "LEASE_SECONDS": LEASE_SECONDS}
    run = host.program(argv, "run", env=host.environment(**settings))
    enqueued: set[UUID] = set()
    numbers = itertools.count()
    waker = Waker(kill_plan, random.Random(seed))
    eventually(
        lambda: is_fed(host, enqueued, numbers) and waker.look() and waker.woken >= freezes,
        lambda: f"{freezes} freezes ({waker.woken} so far)",
        seconds=freezes * SECONDS_PER_FREEZE,
    )
    eventually(lambda: count_unfinished(host) == 0, "the end of all emails")
    stop(run)
    proof = Proof(kill_plan.kills(), host.books(enqueued), enqueued, seconds=time.monotonic() - began_at)
    # A dead letter may remain if later evidence proved that a held email was sent.
    proof.assert_harmless()
    return proof


def main() -> None:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.steps.frozen", description=summary, epilog=details)
    parser.add_argument("--freezes", type=int, default=200, metavar="N", help="how many; default: 200")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the random seed of the targets; default: 1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatcher-steps-") as folder, own_host(Path(folder)) as host:
        proof = freeze(host, freezes=options.freezes, seed=options.seed)
    console = Console()
    frozen = Counter(kill.step for kill in proof.kills)
    console.print({step.value: frozen[step] for step in (*WORKER_STEPS, *(frozen.keys() - set(WORKER_STEPS)))})
    console.print(
        f"{len(proof.enqueued)} emails {proof.books.counts}, duplicates {len(proof.books.duplicates)}, "
        f"lost {len(proof.books.lost)}, held in vain {len(proof.needlessly_held)}; "
        f"seed {options.seed}, {proof.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
