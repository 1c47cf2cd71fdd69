"""The environment of a storm, which the adversary can disturb, and the code that several of its actions share."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any, Final
from uuid import UUID

import pika.exceptions
import psycopg

from dispatcher.dev.oracle import Answer
from tests.acceptance.harness import Double, Sink
from tests.acceptance.outages import POSTGRES
from tests.acceptance.rabbit import Rabbit
from tests.chaos.diary import Diary
from tests.chaos.outages import Outages
from tests.chaos.plan import Ground, HarnessFailed, StormPlan
from tests.chaos.producer import read_notes
from tests.chaos.reporter import Reporter
from tests.chaos.subject import Subject
from tests.store.steered_clock import SteeredClock
from tests.supervisor.program import Event, Program

PRODUCERS: Final = 3
SHARED_FRACTION: Final = 0.1
"""The share of emails with shared keys. Every producer enqueues each shared key."""


class Producers:
    def __init__(self, folder: Path, database_url: str, plan: StormPlan) -> None:
        self._folder = folder
        self._env = {"PATH": os.defpath, "DISPATCHER_DATABASE_URL": database_url}
        began_at = time.time()
        self._words = (
            "--began-at", str(began_at), "--until", str(began_at + plan.seconds),
            "--rate", str(plan.rate * (1 - SHARED_FRACTION) / PRODUCERS),
            "--shared-rate", str(plan.rate * SHARED_FRACTION),
            "--channel", plan.channel, "--recipients", str(plan.recipients),
        )  # fmt: skip
        self._starts = 0
        self._programs = {name: self._start(name) for name in (f"p{number}" for number in range(PRODUCERS))}

    def pids(self) -> list[int]:
        return [program.pid for program in self._programs.values() if program.exit_code is None]

    def restart_killed(self) -> None:
        for name, program in self._programs.items():
            if program.exit_code == -signal.SIGKILL:
                self._programs[name] = self._start(name)
            elif program.exit_code:
                raise HarnessFailed(f"producer {name} ended with {program.exit_code}:\n{program.words[-2000:]}")

    @property
    def are_done(self) -> bool:
        return all(program.exit_code == 0 for program in self._programs.values())

    def answers(self) -> list[Answer]:
        """Every answer of any producer. Leaves out emails that had expired before they were enqueued."""
        return [
            Answer(key, UUID(email_id), acceptance)
            for name in self._programs
            for key, email_id, acceptance in read_notes(self._file(name)).answers
            if acceptance != "expired"
        ]

    def keys(self) -> frozenset[str]:
        return frozenset(key for name in self._programs for key in read_notes(self._file(name)).keys)

    def destroy(self) -> None:
        for program in self._programs.values():
            program.destroy()

    def _start(self, name: str) -> Program:
        self._starts += 1
        words = ("--name", name, "--file", str(self._file(name)), *self._words)
        argv = [sys.executable, "-m", "tests.chaos.producer", *words]
        return Program(argv, self._folder, f"producer-{self._starts}", env=self._env)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.notes"


OBSERVE_SECONDS: Final = 0.5


@dataclass(slots=True)
class StormStage:
    """The environment of a storm. Everything in it is real, except the provider. `calm`: see `later`."""

    plan: StormPlan
    ground: Ground
    hosts: Sequence[Subject]
    producers: Producers
    provider: Double | Sink
    rabbit: Rabbit
    outages: Outages
    clock: SteeredClock
    diary: Diary
    reporter: Reporter | None
    calm: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _hung: dict[int, Timer] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)
    _observed: tuple[float, int] = (0.0, 0)

    @property
    def provider_name(self) -> str:
        """The provider that the double simulates: `sendgrid`, `twilio` or `smtp`."""
        return "twilio" if self.plan.channel == "sms" else self.plan.provider

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        heappush(self.calm, (time.monotonic() + seconds, next(self._numbers), action))

    def step(self, *, everything: bool = False) -> None:
        """Make the calls that are due, and restart the processes and servers that the adversary has ended."""
        until = math.inf if everything else time.monotonic()
        due = []
        while self.calm and self.calm[0][0] <= until:
            due.append(heappop(self.calm)[2])
        for action in due:
            action()  # the action may call `later` again
        self.outages.step()
        self.producers.restart_killed()
        if (code := self.provider.program.exit_code) is not None:
            raise HarnessFailed(f"the provider's double ended with {code}:\n{self.provider.program.words[-2000:]}")
        for host in self.hosts:
            self._restart(host)
        if self.reporter is not None:
            self.reporter.source.step()
            self._observe(self.reporter)

    def sms(self) -> set[UUID]:
        has_sms = self.plan.channel != "email"
        return self.provider.sms() if has_sms and isinstance(self.provider, Double) else set()

    def _observe(self, reporter: Reporter) -> None:
        observed_at, octets = self._observed
        if time.monotonic() < observed_at + OBSERVE_SECONDS:
            return
        if (now_octets := self.provider.ledger_octets) != octets:
            reporter.observe(self.provider.delivered(), self.sms())
        self._observed = (time.monotonic(), now_octets)

    def behave(self, **behaviour: object) -> None:
        self.provider.behave(**{"latency_ms": self.plan.latency_ms, **behaviour})

    def find(self, role: str) -> list[int]:
        return [pid for host in self.hosts for pid in host.find(role)]

    def events(self, name: str) -> list[Event]:
        return [event for host in self.hosts for event in host.events(name)]

    def hang(self, pid: int, seconds: float) -> None:
        """Freeze a PostgreSQL backend for this long; raises ProcessLookupError if the backend has ended."""
        os.kill(pid, signal.SIGSTOP)
        # A separate thread wakes the backend, because the storm's own thread may be waiting for a lock that the backend
        # has.
        self._hung[pid] = Timer(seconds, _wake, [pid])
        self._hung[pid].start()

    def wake(self) -> None:
        """Send SIGCONT to all hung backends, because a server with a hung backend cannot stop."""
        for pid, timer in self._hung.items():
            timer.cancel()
            _wake(pid)
        self._hung.clear()

    @property
    def has_hung(self) -> bool:
        return any(timer.is_alive() for timer in self._hung.values())

    def _restart(self, host: Subject) -> None:
        code = host.program.exit_code
        if code is None:
            return
        was_stopping = host.is_stopping
        # Exit code 1 means that a process could not record its results within the drain time and was killed; the next
        # run recovers its leases. Exit code -15 means that SIGTERM ended a run that had not yet installed its handlers.
        if code not in ((0, 1, -9, -15) if was_stopping else (-9,)):
            self.diary.note_fault(
                f"the run of {host.name} ended with {code} {'after SIGTERM' if was_stopping else 'by itself'}"
            )
        host.start()


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


Action = Callable[[StormStage, Random], bool]
"""Causes a fault; returns False if the fault is not possible now."""

BROKEN: Final = (OSError, AssertionError, pika.exceptions.AMQPError, psycopg.Error)


def rows_of(stage: StormStage, statement: str, *values: object) -> list[tuple[Any, ...]]:
    if not stage.outages.is_away(POSTGRES):
        url = stage.ground.database_url
        with suppress(*BROKEN), psycopg.connect(url, autocommit=True, connect_timeout=2) as session:
            return session.execute(statement.encode(), values).fetchall()
    return []


def short_or_long(stage: StormStage, random: Random) -> float:
    """A time in seconds: either short, or so long that other hosts recover the leases (a lease plus the grace
    period)."""
    if random.random() < 0.5:
        return random.uniform(0.3, 2.0)
    return stage.plan.lease_seconds * 1.5 + random.uniform(1.0, 4.0)
