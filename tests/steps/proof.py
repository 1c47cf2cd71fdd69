"""Kills processes at every step of the protocol, and checks every email after each round.

One `dispatcher run` runs all the time, while its processes are killed again and again (see `kill_points`). In each
round, emails are enqueued until all kills of the round have happened; some recipients are rejected or greylisted. Then
the dispatcher finishes all emails, and every email is checked: none is lost or duplicated, and only emails that were on
the wire at a kill are held. A lease lasts 300 s, so no recovery waits for a lease to expire.

`freeze` freezes workers at every step until their leases have expired, and wakes them at random times. Meanwhile, other
workers get the expired leases. After waking, a worker must send no email twice and break no guarantee. The relay is
also frozen, after it has read a live worker's ledger and before it releases leases. Only emails that were on the wire
at a freeze may be held.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Timer
from types import MappingProxyType
from typing import Final
from uuid import UUID

from dispatcher import Email
from tests.acceptance.books import Books
from tests.acceptance.harness import Host, stop
from tests.steps.kill_points import WORKER_STEPS, Kill, KillPlan
from tests.store.books import email
from tests.supervisor.program import Program, eventually

SETTINGS: Final = MappingProxyType(
    {"WORKERS": 3, "PREFETCH": 12, "SMTP_CONNECTIONS": 4, "LOG_LEVEL": "error", "METRICS_ADDRESS": "off"}
)
BACKLOG: Final = 60
BATCH: Final = 40
KILLS_PER_ROUND: Final = 50
WORKERS_PER_RELAY: Final = 9
"""How many workers are killed for each relay. A relay takes longer to restart, and no lease is recovered without a
relay."""
ROUND_SECONDS: Final = 120.0


@dataclass
class Proof:
    """The result of a run: all kills, in order; and the final state of the tables, of the queues and of the provider's
    ledger."""

    kills: list[Kill]
    books: Books

    @property
    def needlessly_held(self) -> set[UUID]:
        """Held emails that were not on the wire at any kill."""
        return set(self.books.by_status.get("held", ())).difference(*(kill.on_the_wire for kill in self.kills))

    def assert_balanced(self) -> None:
        """Asserts everything that the protocol guarantees."""
        self.assert_harmless()
        assert not self.books.misannounced, f"with a dead letter, but alive: {self.books.misannounced}"

    def assert_harmless(self) -> None:
        """As `assert_balanced`, but allows the dead letter of an email that later evidence proved to be sent."""
        self.books.assert_harmless()
        assert set(self.books.counts) <= {"sent", "failed", "held"}, self.books.counts
        assert not self.needlessly_held, f"held, and never on the wire: {self.needlessly_held}"


def prove(host: Host, kills: int, seed: int) -> Proof:
    """Kills this number of processes (at least 1) during a run, and checks every email after each round. Raises
    AssertionError if an email was lost, duplicated or needlessly held."""
    proof = None
    kill_plan = KillPlan(host.folder / "range", seed)
    kill_plan.allow(0, 0)
    host.sink("--latency-ms", "3")
    run = start(host, kill_plan, **SETTINGS)
    enqueued: set[UUID] = set()
    numbers = itertools.count()

    def are_dead(count: int) -> bool:
        return is_fed(host, enqueued, numbers) and len(kill_plan.kills()) >= count

    rounds = -(-kills // KILLS_PER_ROUND)
    for done in range(1, rounds + 1):
        allowed = kills * done // rounds
        relays = allowed // (WORKERS_PER_RELAY + 1)
        kill_plan.allow(allowed - relays, relays)
        eventually(partial(are_dead, allowed), f"{allowed} kills", seconds=ROUND_SECONDS)
        eventually(lambda: host.count_unfinished() == 0, "the end of all emails", seconds=ROUND_SECONDS)
        books = eventually(lambda: _announced(host, enqueued), "the dead letters")
        proof = Proof(kill_plan.kills(), books)
        proof.assert_balanced()
    stop(run)
    assert proof is not None
    return proof


def start(host: Host, kill_plan: KillPlan, **settings: object) -> Program:
    plan = [str(kill_plan.folder), kill_plan.seed, kill_plan.signal.name]
    return host.program(
        [sys.executable, "-m", "tests.steps.kill_points", *plan], "run", env=host.environment(**settings)
    )


def is_fed(host: Host, enqueued: set[UUID], numbers: Iterator[int]) -> bool:
    """Enqueues more emails if few emails are unfinished; returns True."""
    if host.count_unfinished() < BACKLOG:
        enqueued.update(host.enqueue(_email(next(numbers)) for _ in range(BATCH)))
    return True


def _email(number: int) -> Email:
    recipient = {3: "refused", 7: "greylisted"}.get(number % 10, "customer")
    return email(f"email-{number}", to=f"{recipient}-{number}@example.org")


def _announced(host: Host, enqueued: set[UUID]) -> Books | None:
    books = host.books(enqueued)
    return books if books.is_announced else None


LEASE_SECONDS: Final = 1
SHORTEST_SECONDS: Final = 0.8
LONGEST_SECONDS: Final = 2.5
WORKERS_PER_FROZEN_RELAY: Final = 12
SECONDS_PER_FREEZE: Final = 10.0
"""The time limit for one freeze, far longer than needed."""


def freeze(host: Host, freezes: int, seed: int) -> Proof:
    """Freezes and wakes this number of processes during a run, then checks every email. Raises AssertionError if an
    email was lost, duplicated or needlessly held."""
    kill_plan = KillPlan(host.folder / "range", seed, signal.SIGSTOP)
    relays = freezes // (WORKERS_PER_FROZEN_RELAY + 1)
    kill_plan.allow(freezes - relays, relays)
    host.sink("--latency-ms", "3")
    run = start(host, kill_plan, **{**SETTINGS, "WORKERS": 5, "LEASE_SECONDS": LEASE_SECONDS})
    enqueued: set[UUID] = set()
    numbers = itertools.count()
    chance, waking = random.Random(seed), list[Timer]()

    def are_awake() -> bool:
        """Wakes each newly frozen process after a random time. Whether all are awake."""
        for kill in kill_plan.kills()[len(waking) :]:
            waking.append(Timer(chance.uniform(SHORTEST_SECONDS, LONGEST_SECONDS), _wake, [kill.pid]))
            waking[-1].start()
        return not any(timer.is_alive() for timer in waking)

    def are_frozen() -> bool:
        """Whether workers had all their freezes, and all processes are awake. A relay freezes only if leases expire."""
        is_awake = are_awake()
        workers = sum(kill.step in WORKER_STEPS for kill in kill_plan.kills()[: len(waking)])
        return is_fed(host, enqueued, numbers) and is_awake and workers == freezes - relays

    seconds = freezes * SECONDS_PER_FREEZE
    eventually(are_frozen, lambda: f"{freezes} freezes ({len(waking)} so far)", seconds=seconds)
    eventually(lambda: are_awake() and host.count_unfinished() == 0, "the end of all emails")
    stop(run)
    proof = Proof(kill_plan.kills(), host.books(enqueued))
    # A dead letter may remain if later evidence proved that a held email was sent.
    proof.assert_harmless()
    return proof


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
