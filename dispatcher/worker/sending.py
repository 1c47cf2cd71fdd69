"""One email on its way through a worker, from its lease to its ack."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final
from uuid import UUID

from dispatcher.broker.consumer import Delivery
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import OnUncertain
from dispatcher.host.clock import steady_clock
from dispatcher.store.leases import Lease


class Phase(Enum):
    """How far an attempt is; what a drain may still stop."""

    PREPARING = auto()
    """Nothing left yet: may be stopped."""
    ON_THE_WIRE = auto()
    """A byte that could cause acceptance left: must end by itself."""
    RECORDING = auto()
    """The answer is known and being written."""
    WAITING = auto()
    """Waits for its next attempt, or for memory: may be stopped."""
    RETURNING = auto()
    """Nothing left, or the provider took nothing: being given back."""


_OVER: Final = (Phase.RECORDING, Phase.RETURNING)
_STOPPABLE: Final = (Phase.PREPARING, Phase.WAITING)


class LeaseRanOut(Exception):
    """Raised inside `leaving`: the lease may be another's by now, so nothing may leave. Never leaves the worker."""


@dataclass(slots=True)
class Sending:
    """An email under lease.

    Attributes:
        delivery: The message that brought it.
        email: What to send; None while it is not read, or if there is nothing to read.
        unreadable: Why PostgreSQL cannot read it; None if it can.
        attempt_number: The attempt under way, or the next one.
        policy: What to do if the outcome stays unknown.
        confirmed_at: When the statement was sent by which PostgreSQL last told us that the lease is ours, by
            `clock.steady_clock`.
        leased_until: When the lease ends at the earliest, by the same clock.
        ledger_slot: Where the in-flight ledger has the attempt; None before it left.
        provider: Whom the attempt goes to.
        refused_by: Providers whose refusal the next attempt does not wait for.
        unable: Providers that have found that they cannot carry it.
        away_seconds: How long it stays out of the queue once it is given back.
        started_at: When the attempt began, unix seconds.
        started_steadily_at: The same by `clock.steady_clock`, which nobody sets.
        lease_lost: Somebody else judged it; its result is only evidence now.
        task: What makes its attempts; None while a call that it shares does.
        carried: What that call will say of it; None once it was heard.
        is_stopped: It was told to stop.
        recorded: Done once a deferral is in the database; None unless one is being written.
    """

    lease: Lease
    delivery: Delivery
    policy: OnUncertain
    attempt_number: int
    confirmed_at: float
    leased_until: float
    phase: Phase = Phase.PREPARING
    ledger_slot: int | None = None
    provider: str = ""
    refused_by: set[str] = field(default_factory=set)
    unable: frozenset[str] = frozenset()
    away_seconds: float = 0.0
    started_at: float = 0.0
    started_steadily_at: float = 0.0
    lease_lost: bool = False
    task: asyncio.Task[None] | None = None
    carried: asyncio.Future[Outcome] | None = None
    email: OutgoingEmail | None = None
    unreadable: str | None = None
    is_stopped: bool = False
    recorded: asyncio.Future[None] | None = None

    def begin_attempt(self) -> None:
        """An attempt begins now."""
        self.started_at, self.started_steadily_at = time.time(), steady_clock()

    @property
    def attempted_until(self) -> float:
        """Now, unix seconds: as long after the attempt's beginning as it took, whatever the host's clock is set to."""
        return self.started_at + (steady_clock() - self.started_steadily_at)

    @property
    def email_id(self) -> UUID:
        """The email."""
        return self.lease.email_id

    @property
    def is_cancelled(self) -> bool:
        """Whether we have told it to stop; an adapter may be slow to notice."""
        return self.is_stopped or (self.task is not None and self.task.cancelling() > 0)

    @property
    def work(self) -> asyncio.Future[Any] | None:
        """What it waits for now; None if that is over, or has not begun."""
        return self.carried if self.task is None or self.task.done() else self.task

    def stop(self) -> None:
        """Tells it to stop; for what nothing has left of."""
        self.is_stopped = True
        if (work := self.work) is not None:
            work.cancel()

    def confirm(self, at: float, seconds: float) -> None:
        """A statement that was sent then has prolonged the lease by at least so long from then; never shortens it."""
        self.confirmed_at = max(self.confirmed_at, at)
        self.leased_until = max(self.leased_until, at + seconds)

    @property
    def is_over(self) -> bool:
        """Whether it has been concluded, or is being given back: no later answer changes that."""
        return self.phase in _OVER

    @property
    def may_be_stopped(self) -> bool:
        """Whether giving it back now repeats nothing."""
        return self.phase in _STOPPABLE
