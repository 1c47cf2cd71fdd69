"""Freezes workers at every step of the protocol until their leases have expired, and wakes them at random times.

Meanwhile, other workers get the expired leases. After waking, a worker must send no email twice and break no guarantee.
The relay is also frozen, after it has read a live worker's ledger and before it releases leases. Only emails that were
on the wire at a freeze may be held.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from tests.acceptance.harness import Host, stop
from tests.steps.kill_points import WORKER_STEPS, KillPlan
from tests.steps.proof import SETTINGS, Proof, is_fed, start
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


def freeze(host: Host, freezes: int, seed: int) -> Proof:
    """Freezes and wakes this number of processes during a run, then checks every email. Raises AssertionError if an
    email was lost, duplicated or needlessly held."""
    kill_plan = KillPlan(host.folder / "range", seed, signal.SIGSTOP)
    relays = freezes // (WORKERS_PER_RELAY + 1)
    kill_plan.allow(freezes - relays, relays)
    host.sink("--latency-ms", "3")
    run = start(host, kill_plan, **{**SETTINGS, "WORKERS": 5, "LEASE_SECONDS": LEASE_SECONDS})
    enqueued: set[UUID] = set()
    numbers = itertools.count()
    waker = Waker(kill_plan, random.Random(seed))

    def are_frozen() -> bool:
        """Whether workers had all their freezes, and all processes are awake. A relay freezes only if leases expire."""
        workers = sum(kill.step in WORKER_STEPS for kill in kill_plan.kills())
        is_awake = waker.look() and waker.woken == len(kill_plan.kills())
        return is_fed(host, enqueued, numbers) and is_awake and workers == freezes - relays

    seconds = freezes * SECONDS_PER_FREEZE
    eventually(are_frozen, lambda: f"{freezes} freezes ({waker.woken} so far)", seconds=seconds)
    eventually(lambda: waker.look() and host.count_unfinished() == 0, "the end of all emails")
    stop(run)
    proof = Proof(kill_plan.kills(), host.books(enqueued))
    # A dead letter may remain if later evidence proved that a held email was sent.
    proof.assert_harmless()
    return proof
