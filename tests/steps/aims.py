"""Processes that kill or freeze themselves at a given step of the protocol, as by `kill -9` or `kill -STOP`.

`arm` alters this process, in which `dispatcher run` is then started: the relay and the workers that it forks draw an
aim each, a step and how often to pass it first, and end there; one that is woken again draws the next. Nothing of it
is in the product. What each end found is written down just before: the step, the emails at it, and those on the wire.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import orjson

MOST_PASSAGES: Final = 3
LONGEST_STATEMENT_SECONDS: Final = 0.003
"""A death during a statement comes within so long after it was sent."""


class Step(StrEnum):
    """Where a process may die."""

    BEFORE_LEASE = "before the lease"
    IN_LEASE = "while the lease is being committed"
    AFTER_LEASE = "after the lease"
    RENDERING = "while an email is rendered"
    BEFORE_SLOT = "before the ledger's slot"
    BEFORE_BYTE = "before the first byte"
    AFTER_BYTE = "after the first byte"
    BEFORE_ANSWER = "before the answer is noted"
    AFTER_ANSWER = "after the answer"
    BEFORE_RECORD = "before the record"
    IN_RECORD = "while the record is being committed"
    AFTER_RECORD = "after the record"
    AFTER_ACK = "after the ack"
    BEFORE_PUBLISH = "before messages are published"
    AFTER_PUBLISH = "between published and marked"
    BEFORE_LETTER = "between failed and dead letter"
    AFTER_LETTER = "between dead letter and marked"
    IN_SETTLEMENT = "in a settlement"
    IN_TAKING = "between a look into a living ledger and the releases"


RELAY_STEPS: Final = (
    Step.BEFORE_PUBLISH,
    Step.AFTER_PUBLISH,
    Step.BEFORE_LETTER,
    Step.AFTER_LETTER,
    Step.IN_SETTLEMENT,
)
WORKER_STEPS: Final = tuple(step for step in Step if step not in {*RELAY_STEPS, Step.IN_TAKING})
ON_THE_WIRE: Final = frozenset({Step.BEFORE_BYTE, Step.AFTER_BYTE, Step.BEFORE_ANSWER})
"""Where a death leaves the outcome of the email in doubt."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that died, or was frozen.

    Attributes:
        emails: Those at the step.
        on_the_wire: Those that had left, as far as the ledger could know, and were not answered.
    """

    pid: int
    step: Step
    emails: frozenset[UUID]
    on_the_wire: frozenset[UUID]


class Range:
    """The folder in which a run's aims are drawn and its deaths are written down.

    Attributes:
        signal: What they send themselves.
    """

    def __init__(self, folder: Path, seed: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.folder = folder
        self.signal = number
        self._seed = seed

    def allow(self, workers: int, relays: int) -> None:
        """Lets so many workers and relays die, from the first on; none before this is called."""
        for role, count in (("worker", workers), ("relay", relays)):
            path = self.folder / f"{role}.allowed"
            path.with_suffix(".new").write_text(str(count))
            path.with_suffix(".new").rename(path)

    def kills(self) -> list[Kill]:
        """Whoever died so far, in order."""
        path = self.folder / "kills"
        # Somebody may be writing the last one.
        *whole, _unfinished = path.read_bytes().split(b"\n") if path.exists() else [b""]
        lines = [orjson.loads(line) for line in whole]
        return [
            Kill(line["pid"], Step(line["step"]), _ids(line["emails"]), _ids(line["on_the_wire"])) for line in lines
        ]

    def draw(self, role: str, steps: tuple[Step, ...]) -> tuple[Step, random.Random] | None:
        """The next aim of that role; None while no more may die."""
        with (self.folder / f"{role}.drawn").open("ab") as drawn:
            fcntl.flock(drawn, fcntl.LOCK_EX)
            number = drawn.seek(0, os.SEEK_END)  # others may have drawn since it was opened
            if number >= int((self.folder / f"{role}.allowed").read_text()):
                return None
            drawn.write(b".")
        # Every step in turn, in an order of its own for each turn.
        turn, place = divmod(number, len(steps))
        order = random.Random(f"{self._seed} {role} {turn}").sample(steps, len(steps))
        return order[place], random.Random(f"{self._seed} {role} {number}")

    def write_down(self, step: Step, emails: Iterable[UUID], on_the_wire: Iterable[UUID]) -> None:
        """Notes a death that comes next."""
        line = {"pid": os.getpid(), "step": step, "emails": list(emails), "on_the_wire": list(on_the_wire)}
        descriptor = os.open(self.folder / "kills", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, orjson.dumps(line) + b"\n")
        os.close(descriptor)


def _ids(words: list[str]) -> frozenset[UUID]:
    return frozenset(UUID(word) for word in words)


class Marksman:
    """One process's aim.

    Attributes:
        role: Empty in a process that does not die.
    """

    def __init__(self, kill_range: Range) -> None:
        self._range = kill_range
        self.role = ""
        self._steps: tuple[Step, ...] = ()
        self._aim: Step | None = None
        self._left = 0
        self.wait_seconds = 0.0
        self.on_the_wire: dict[int, UUID] = {}

    def enlist(self, role: str, steps: tuple[Step, ...]) -> None:
        """This process is one that dies."""
        self.role, self._steps = role, steps

    def is_at(self, step: Step) -> bool:
        """Whether this passage is the last."""
        if self._aim is None and self.role and (drawn := self._range.draw(self.role, self._steps)):
            self._aim, chance = drawn
            self._left = chance.randint(1, MOST_PASSAGES)
            self.wait_seconds = chance.uniform(0, LONGEST_STATEMENT_SECONDS)
        if self._aim is not step:
            return False
        self._left -= 1
        return self._left == 0

    def pass_by(self, step: Step, emails: Iterable[UUID] = ()) -> None:
        """Dies here if it is the last passage."""
        if self.is_at(step):
            self.die(step, emails)

    def die(self, step: Step, emails: Iterable[UUID]) -> None:
        """Dies; or is frozen, and goes on with another aim when it is woken."""
        self._range.write_down(step, emails, self.on_the_wire.values())
        os.kill(os.getpid(), self._range.signal)
        self._aim = None


def arm(kill_range: Range) -> None:
    """Alters this process, and whatever it forks."""
    marksman = Marksman(kill_range)
    _never_tire()
    _arm_ledger(marksman)
    _arm_store(marksman)
    _arm_relay(marksman, kills=kill_range.signal is signal.SIGKILL)


def _never_tire() -> None:
    """A role that ends again and again is started again at once."""
    from dispatcher.supervisor.restarts import Restarts

    Restarts.wait_seconds = property(lambda _: 0.0)  # type: ignore[method-assign, assignment]


def _arm_ledger(marksman: Marksman) -> None:
    from dispatcher.host.ledger import Ledger

    opened, rendering, leaving = Ledger.__init__, Ledger.begin_rendering, Ledger.leaving
    answered, clear = Ledger.answered, Ledger.clear

    def open_ledger(self: Ledger, *given: Any, **named: Any) -> None:
        opened(self, *given, **named)
        marksman.enlist("worker", WORKER_STEPS)

    def begin_rendering(self: Ledger, email_id: UUID, lease_token: int) -> int | None:
        place = rendering(self, email_id, lease_token)
        marksman.pass_by(Step.RENDERING, [email_id])
        return place

    def leave(self: Ledger, email_id: UUID, *given: Any, **named: Any) -> int:
        marksman.pass_by(Step.BEFORE_SLOT, [email_id])
        slot = leaving(self, email_id, *given, **named)
        marksman.on_the_wire[slot] = email_id
        marksman.pass_by(Step.BEFORE_BYTE, [email_id])
        if marksman.is_at(Step.AFTER_BYTE):
            # The byte leaves in this turn of the loop.
            asyncio.get_running_loop().call_soon(marksman.die, Step.AFTER_BYTE, [email_id])
        return slot

    def answer(self: Ledger, slot: int, *given: Any, **named: Any) -> None:
        email_id = marksman.on_the_wire[slot]
        marksman.pass_by(Step.BEFORE_ANSWER, [email_id])
        answered(self, slot, *given, **named)
        del marksman.on_the_wire[slot]
        marksman.pass_by(Step.AFTER_ANSWER, [email_id])

    def empty(self: Ledger, slot: int) -> None:
        clear(self, slot)
        marksman.on_the_wire.pop(slot, None)

    Ledger.__init__ = open_ledger  # type: ignore[method-assign]
    Ledger.begin_rendering = begin_rendering  # type: ignore[method-assign]
    Ledger.leaving = leave  # type: ignore[method-assign]
    Ledger.answered = answer  # type: ignore[method-assign]
    Ledger.clear = empty  # type: ignore[method-assign]


def _arm_store(marksman: Marksman) -> None:
    from dispatcher.store.leases import LeaseStore

    lease, record = LeaseStore.lease, LeaseStore.record

    async def lease_or_die(self: LeaseStore, keys_by_id: dict[UUID, str], *given: Any, **named: Any) -> Any:
        marksman.pass_by(Step.BEFORE_LEASE, keys_by_id)
        leases = await _begun(marksman, Step.IN_LEASE, keys_by_id, lambda: lease(self, keys_by_id, *given, **named))
        marksman.pass_by(Step.AFTER_LEASE, [each.email_id for each in leases])
        return leases

    async def record_or_die(self: LeaseStore, results: Any, *given: Any, **named: Any) -> Any:
        if marksman.role == "relay":
            return await record(self, results, *given, **named)
        emails = [result.email_id for result in results]
        marksman.pass_by(Step.BEFORE_RECORD, emails)
        ours = await _begun(marksman, Step.IN_RECORD, emails, lambda: record(self, results, *given, **named))
        marksman.pass_by(Step.AFTER_RECORD, emails)
        if marksman.is_at(Step.AFTER_ACK):
            # Whoever waits for this acks in the same turn of the loop.
            asyncio.get_running_loop().call_soon(marksman.die, Step.AFTER_ACK, emails)
        return ours

    LeaseStore.lease = lease_or_die  # type: ignore[method-assign]
    LeaseStore.record = record_or_die  # type: ignore[method-assign]


async def _begun(
    marksman: Marksman, step: Step, emails: Iterable[UUID], statement: Callable[[], Awaitable[Any]]
) -> Any:
    """A statement's result; or death while the server executes it, or just after."""
    if not marksman.is_at(step):
        return await statement()
    asyncio.get_running_loop().call_later(marksman.wait_seconds, marksman.die, step, list(emails))
    return await statement()


def _arm_relay(marksman: Marksman, *, kills: bool) -> None:
    from dispatcher.broker.publisher import Publisher
    from dispatcher.recovery.settlement import Settlement

    opened, publish = Publisher.__init__, Publisher.publish
    release = Settlement.release

    def open_publisher(self: Publisher, *given: Any, **named: Any) -> None:
        opened(self, *given, **named)
        marksman.enlist("relay", RELAY_STEPS if kills else (Step.IN_TAKING,))

    async def publish_or_die(self: Publisher, messages: Any) -> Any:
        is_letter = messages[0].queue.endswith(".dlq")
        emails = [UUID(orjson.loads(message.body)["email_id"]) for message in messages]
        marksman.pass_by(Step.BEFORE_LETTER if is_letter else Step.BEFORE_PUBLISH, emails)
        confirmed = await publish(self, messages)
        marksman.pass_by(Step.AFTER_LETTER if is_letter else Step.AFTER_PUBLISH, emails)
        return confirmed

    async def release_or_die(self: Settlement, path: Any, leases: Any) -> Any:
        if self.reason == "worker_died":
            marksman.pass_by(Step.IN_SETTLEMENT)
        elif leases:
            marksman.pass_by(Step.IN_TAKING, [lease.email_id for lease in leases])
        return await release(self, path, leases)

    Publisher.__init__ = open_publisher  # type: ignore[method-assign]
    Publisher.publish = publish_or_die  # type: ignore[method-assign]
    Settlement.release = release_or_die  # type: ignore[method-assign]
