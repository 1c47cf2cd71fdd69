"""Kills or freezes processes at a given step of the protocol, with SIGKILL or SIGSTOP.

`python -m tests.steps.kill_points FOLDER SEED SIGNAL` patches itself, and then is `dispatcher run`. Each relay and each
worker draws a target: a step, and how many times to pass that step first. When the process reaches its target, it
records the step and the emails on the wire. Then it kills or freezes itself. A woken process draws a new target. The
product has no code for this.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.cli.main import main

MAX_PASSES: Final = 3
MAX_STATEMENT_SECONDS: Final = 0.003
"""The maximum delay of a kill after a statement was sent, if the kill must come during the statement."""


class Step(StrEnum):
    """The steps at which a process may be killed or frozen."""

    BEFORE_LEASE = "before the lease"
    IN_LEASE = "while the lease is being committed"
    AFTER_LEASE = "after the lease"
    RENDERING = "while an email is rendered"
    BEFORE_SLOT = "before the ledger's slot"
    BEFORE_BYTE = "before the first byte"
    AFTER_BYTE = "after the first byte"
    BEFORE_ANSWER = "before the answer is in the ledger"
    AFTER_ANSWER = "after the answer"
    BEFORE_RECORD = "before the record"
    IN_RECORD = "while the record is being committed"
    AFTER_RECORD = "after the record"
    AFTER_ACK = "after the ack"
    BEFORE_PUBLISH = "before messages are published"
    AFTER_PUBLISH = "between published and marked"
    BEFORE_DEAD_LETTER = "between failed and dead letter"
    AFTER_DEAD_LETTER = "between dead letter and marked"
    IN_SETTLEMENT = "in a settlement"
    IN_RELEASE = "between reading a live worker's ledger and the releases"


RELAY_STEPS: Final = (
    Step.BEFORE_PUBLISH,
    Step.AFTER_PUBLISH,
    Step.BEFORE_DEAD_LETTER,
    Step.AFTER_DEAD_LETTER,
    Step.IN_SETTLEMENT,
)
WORKER_STEPS: Final = tuple(step for step in Step if step not in {*RELAY_STEPS, Step.IN_RELEASE})
ON_THE_WIRE: Final = frozenset({Step.BEFORE_BYTE, Step.AFTER_BYTE, Step.BEFORE_ANSWER})
"""The steps at which a kill makes the email's outcome uncertain."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that was killed or frozen. `on_the_wire`: the emails that were on the wire according to its ledger."""

    pid: int
    step: Step
    on_the_wire: frozenset[UUID]


class KillPlan:
    """The targets and the recorded kills of a run, in a folder that all processes share."""

    def __init__(self, folder: Path, seed: int | str, number: signal.Signals = signal.SIGKILL) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.seed = str(seed)
        self.signal = number

    def allow(self, workers: int, relays: int) -> None:
        """Sets how many workers and relays may be killed in total. Before the first call, none may be killed."""
        for role, count in (("worker", workers), ("relay", relays)):
            path = self.folder / f"{role}.allowed"
            path.with_suffix(".new").write_text(str(count))
            path.with_suffix(".new").rename(path)

    def kills(self) -> list[Kill]:
        path = self.folder / "kills"
        # The last line may be incomplete, because a process may be writing it.
        *whole, _unfinished = path.read_bytes().split(b"\n") if path.exists() else [b""]
        lines = [orjson.loads(line) for line in whole]
        return [Kill(line["pid"], Step(line["step"]), frozenset(map(UUID, line["on_the_wire"]))) for line in lines]

    def next_target(self, role: str, steps: tuple[Step, ...]) -> tuple[Step, random.Random] | None:
        """The next target for this role; None while no further process may be killed."""
        with (self.folder / f"{role}.drawn").open("ab") as drawn:
            fcntl.flock(drawn, fcntl.LOCK_EX)
            number = drawn.seek(0, os.SEEK_END)  # other processes may have drawn since the file was opened
            if number >= int((self.folder / f"{role}.allowed").read_text()):
                return None
            drawn.write(b".")
        # Draw every step once in a random order, then every step again in a new random order, and so on.
        turn, place = divmod(number, len(steps))
        order = random.Random(f"{self.seed} {role} {turn}").sample(steps, len(steps))
        return order[place], random.Random(f"{self.seed} {role} {number}")

    def record(self, step: Step, on_the_wire: Iterable[UUID]) -> None:
        line = {"pid": os.getpid(), "step": step, "on_the_wire": list(on_the_wire)}
        descriptor = os.open(self.folder / "kills", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, orjson.dumps(line) + b"\n")
        os.close(descriptor)


class FaultInjector:
    """Kills or freezes this process when the process reaches the step that the kill plan drew for it. A process without
    a role is never killed."""

    def __init__(self, kill_plan: KillPlan) -> None:
        self._plan = kill_plan
        self.role = ""
        self._steps: tuple[Step, ...] = ()
        self._target: Step | None = None
        self._left = 0
        self.wait_seconds = 0.0
        self.on_the_wire: dict[int, UUID] = {}

    def enable(self, role: str, steps: tuple[Step, ...]) -> None:
        self.role, self._steps = role, steps

    def is_due(self, step: Step) -> bool:
        if self._target is None and self.role and (drawn := self._plan.next_target(self.role, self._steps)):
            self._target, chance = drawn
            self._left = chance.randint(1, MAX_PASSES)
            self.wait_seconds = chance.uniform(0, MAX_STATEMENT_SECONDS)
        if self._target is not step:
            return False
        self._left -= 1
        return self._left == 0

    def reach(self, step: Step) -> None:
        if self.is_due(step):
            self.die(step)

    def die(self, step: Step) -> None:
        """Kills or freezes the process. A woken process draws a new target."""
        self._plan.record(step, self.on_the_wire.values())
        os.kill(os.getpid(), self._plan.signal)
        self._target = None


def inject_faults(kill_plan: KillPlan) -> None:
    """Patches this process, and thereby all processes that it forks."""
    injector = FaultInjector(kill_plan)
    _restart_without_wait()
    _inject_into_ledger(injector)
    _inject_into_store(injector)
    _inject_into_relay(injector, kills=kill_plan.signal is signal.SIGKILL)


def _restart_without_wait() -> None:
    from dispatcher.supervisor.supervised import Restarts

    Restarts.wait_seconds = property(lambda _: 0.0)  # type: ignore[method-assign, assignment]


def _inject_into_ledger(injector: FaultInjector) -> None:
    from dispatcher.host.ledger import Ledger

    opened, rendering, leaving = Ledger.__init__, Ledger.begin_rendering, Ledger.mark_on_wire
    answered, clear = Ledger.mark_answered, Ledger.clear

    def open_ledger(self: Ledger, *given: Any, **named: Any) -> None:
        opened(self, *given, **named)
        injector.enable("worker", WORKER_STEPS)

    def begin_rendering(self: Ledger, email_id: UUID, lease_token: int) -> int | None:
        place = rendering(self, email_id, lease_token)
        injector.reach(Step.RENDERING)
        return place

    def leave(self: Ledger, email_id: UUID, *given: Any, **named: Any) -> int:
        injector.reach(Step.BEFORE_SLOT)
        slot = leaving(self, email_id, *given, **named)
        injector.on_the_wire[slot] = email_id
        injector.reach(Step.BEFORE_BYTE)
        if injector.is_due(Step.AFTER_BYTE):
            # The byte is sent in this iteration of the event loop, so the kill comes in the next one.
            asyncio.get_running_loop().call_soon(injector.die, Step.AFTER_BYTE)
        return slot

    def answer(self: Ledger, slot: int, *given: Any, **named: Any) -> None:
        injector.reach(Step.BEFORE_ANSWER)
        answered(self, slot, *given, **named)
        del injector.on_the_wire[slot]
        injector.reach(Step.AFTER_ANSWER)

    def empty(self: Ledger, slot: int) -> None:
        clear(self, slot)
        injector.on_the_wire.pop(slot, None)

    Ledger.__init__ = open_ledger  # type: ignore[method-assign]
    Ledger.begin_rendering = begin_rendering  # type: ignore[method-assign]
    Ledger.mark_on_wire = leave  # type: ignore[method-assign]
    Ledger.mark_answered = answer  # type: ignore[method-assign]
    Ledger.clear = empty  # type: ignore[method-assign]


def _inject_into_store(injector: FaultInjector) -> None:
    from dispatcher.store.leases import LeaseStore

    lease, record = LeaseStore.lease, LeaseStore.record

    async def lease_or_die(self: LeaseStore, keys_by_id: dict[UUID, str], *given: Any, **named: Any) -> Any:
        injector.reach(Step.BEFORE_LEASE)
        leases = await _interrupted(injector, Step.IN_LEASE, partial(lease, self, keys_by_id, *given, **named))
        injector.reach(Step.AFTER_LEASE)
        return leases

    async def record_or_die(self: LeaseStore, results: Any, *given: Any, **named: Any) -> Any:
        if injector.role == "relay":
            return await record(self, results, *given, **named)
        injector.reach(Step.BEFORE_RECORD)
        ours = await _interrupted(injector, Step.IN_RECORD, partial(record, self, results, *given, **named))
        injector.reach(Step.AFTER_RECORD)
        if injector.is_due(Step.AFTER_ACK):
            # The caller acks in this iteration of the event loop, so the kill comes in the next one.
            asyncio.get_running_loop().call_soon(injector.die, Step.AFTER_ACK)
        return ours

    LeaseStore.lease = lease_or_die  # type: ignore[method-assign]
    LeaseStore.record = record_or_die  # type: ignore[method-assign]


async def _interrupted(injector: FaultInjector, step: Step, statement: Callable[[], Awaitable[Any]]) -> Any:
    """Runs a statement; if the step is due, kills the process while the server executes it, or just after."""
    if not injector.is_due(step):
        return await statement()
    asyncio.get_running_loop().call_later(injector.wait_seconds, injector.die, step)
    return await statement()


def _inject_into_relay(injector: FaultInjector, *, kills: bool) -> None:
    from dispatcher.broker.publisher import Publisher
    from dispatcher.recovery.settlement import Settlement

    opened, publish = Publisher.__init__, Publisher.publish
    release = Settlement.release

    def open_publisher(self: Publisher, *given: Any, **named: Any) -> None:
        opened(self, *given, **named)
        injector.enable("relay", RELAY_STEPS if kills else (Step.IN_RELEASE,))

    async def publish_or_die(self: Publisher, messages: Any) -> Any:
        is_dead_letter = messages[0].queue.endswith(".dlq")
        injector.reach(Step.BEFORE_DEAD_LETTER if is_dead_letter else Step.BEFORE_PUBLISH)
        confirmed = await publish(self, messages)
        injector.reach(Step.AFTER_DEAD_LETTER if is_dead_letter else Step.AFTER_PUBLISH)
        return confirmed

    async def release_or_die(self: Settlement, path: Any, leases: Any) -> Any:
        if self.reason == "worker_died":
            injector.reach(Step.IN_SETTLEMENT)
        elif leases:
            injector.reach(Step.IN_RELEASE)
        return await release(self, path, leases)

    Publisher.__init__ = open_publisher  # type: ignore[method-assign]
    Publisher.publish = publish_or_die  # type: ignore[method-assign]
    Settlement.release = release_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    inject_faults(KillPlan(Path(sys.argv[1]), sys.argv[2], signal.Signals[sys.argv[3]]))
    sys.exit(main(["run"]))
