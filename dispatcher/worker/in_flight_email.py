"""An email in a worker's hands, from its lease to its ack: its states, and every transition between them.

    leased ──▶ PREPARING ─NAME─▶ NAMED ─LEAVE─▶ ON_THE_WIRE ─ANSWER─▶ ANSWERED ─RECORD─▶ RECORDED ─FINISH─▶ DONE
                 │   ▲             │                 │                   │                  │ deferred: WAIT
                 │   └─────────────┴────COME_BACK────┘                   ├▶ IN_DOUBT        ▼
                 │                                                       └▶ REFUSED      WAITING ─RESUME─▶ PREPARING
                 └─STOP─▶ STOPPED ─RETURN─▶ RETURNING ─FINISH─▶ DONE

The rules that the table states:

- The only way to the wire leads over NAMED: the ledger slot is written before the lease is checked for the last time.
- The only way to an ack leads over RECORDED or RETURNING: a message is acked after a commit.
- Only what is not on the wire can be stopped or given back. What is stopped never leaves.
- An answer counts once: whatever comes after ANSWERED or RETURNING changes nothing.

`InFlightEmail.on` is the one writer of the state. The send stage raises every event up to ANSWER, and RETURN; the
stages that commit raise the others. `tests/model` searches what this table allows.
"""

from __future__ import annotations

import asyncio
import time
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from dispatcher.broker.consumer import Delivery
from dispatcher.domain.status import OnUncertain
from dispatcher.host.clock import steady_clock
from dispatcher.store.leases import Lease, Result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class State(IntEnum):
    """How far a leased email is. An IntEnum, because its hash is computed in C."""

    PREPARING = auto()
    """An attempt is being made; nothing has left."""
    WAITING = auto()
    """It waits for its next attempt, or for memory; nothing is under way."""
    STOPPED = auto()
    """The worker drains, or the lease was lost; nothing has left, and nothing will."""
    NAMED = auto()
    """The ledger says on the wire. Whether the lease is still valid is checked next."""
    ON_THE_WIRE = auto()
    """A byte that could cause acceptance may have left: only the provider's answer, or a deadline, ends this."""
    ANSWERED = auto()
    """The outcome is known, and is being recorded."""
    IN_DOUBT = auto()
    """The reply to a record statement was lost: the outcome may be recorded already."""
    REFUSED = auto()
    """PostgreSQL refuses the result. The lease is not renewed any more, so that a rescue can judge the email."""
    RECORDED = auto()
    """The commit holds the result. The slot is cleared and the message acked next."""
    RETURNING = auto()
    """The lease is being given back."""
    DONE = auto()
    """The worker has nothing more to do with it."""


class Event(IntEnum):
    """What happens to a leased email."""

    WAIT = auto()
    """It has to wait."""
    RESUME = auto()
    """Its wait is over."""
    STOP = auto()
    """It must not leave any more."""
    NAME = auto()
    """Its ledger slot is written."""
    LEAVE = auto()
    """Its lease was found valid after the slot was written."""
    COME_BACK = auto()
    """Its slot was emptied: the lease is void, or the provider took nothing, and the attempt goes on."""
    ANSWER = auto()
    """The attempt has an outcome."""
    LOSE_REPLY = auto()
    """PostgreSQL was lost while it recorded the result."""
    REFUSE = auto()
    """PostgreSQL cannot record the result."""
    RECORD = auto()
    """A commit holds the result."""
    RETURN = auto()
    """Its lease is to be given back."""
    FINISH = auto()
    """The commit that ends its lease was confirmed."""


TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    # The send stage.
    (State.PREPARING, Event.WAIT): State.WAITING,
    (State.WAITING, Event.RESUME): State.PREPARING,
    (State.PREPARING, Event.NAME): State.NAMED,
    (State.NAMED, Event.LEAVE): State.ON_THE_WIRE,
    (State.NAMED, Event.COME_BACK): State.PREPARING,
    (State.ON_THE_WIRE, Event.COME_BACK): State.PREPARING,
    (State.PREPARING, Event.ANSWER): State.ANSWERED,  # our own word: the content is gone, say
    (State.STOPPED, Event.ANSWER): State.ANSWERED,  # by an adapter that did not notice the stop
    (State.ON_THE_WIRE, Event.ANSWER): State.ANSWERED,
    # The record stage.
    (State.ANSWERED, Event.RECORD): State.RECORDED,
    (State.ANSWERED, Event.LOSE_REPLY): State.IN_DOUBT,
    (State.ANSWERED, Event.REFUSE): State.REFUSED,
    (State.IN_DOUBT, Event.RECORD): State.RECORDED,
    (State.IN_DOUBT, Event.LOSE_REPLY): State.IN_DOUBT,
    (State.IN_DOUBT, Event.REFUSE): State.REFUSED,
    (State.REFUSED, Event.RECORD): State.RECORDED,
    (State.REFUSED, Event.LOSE_REPLY): State.IN_DOUBT,
    (State.REFUSED, Event.REFUSE): State.REFUSED,
    (State.RECORDED, Event.FINISH): State.DONE,
    (State.RECORDED, Event.WAIT): State.WAITING,
    (State.RECORDED, Event.RETURN): State.RETURNING,
    # A drain, or a lost lease.
    (State.PREPARING, Event.STOP): State.STOPPED,
    (State.WAITING, Event.STOP): State.STOPPED,
    (State.PREPARING, Event.RETURN): State.RETURNING,
    (State.STOPPED, Event.RETURN): State.RETURNING,
    (State.RETURNING, Event.FINISH): State.DONE,
}


class NotAllowed(Exception):
    """An event came in a state for which the table has no row: a bug of the worker."""


class LeaseRanOut(Exception):
    """Raised by `Attempt.leaving`: the lease may be another's by now, so nothing may leave. Never leaves the worker."""


class InFlightEmail:
    """An email under lease.

    Attributes:
        delivery: The message that brought it.
        content: What to send; None while it is not read, or if it was deleted.
        policy: What to do if the outcome stays unknown.
        state: Written by `on` alone.
        attempt_number: The attempt under way, or the next one.
        confirmed_at: When the statement was sent by which PostgreSQL last confirmed the lease, by `clock.steady_clock`.
        leased_until: When the lease ends at the earliest, by the same clock.
        ledger_slot: Where the in-flight ledger has the attempt; None before it left.
        provider: Whom the attempt goes to.
        started_at: When the attempt began, unix seconds.
        refused_by: Providers whose refusal the next attempt does not wait for.
        unable: Providers that have found that they cannot carry it.
        work: What it waits for: its task, the call that it shares, or the timer of its next attempt.
    """

    __slots__ = (
        *("lease", "delivery", "content", "policy", "state", "attempt_number", "confirmed_at", "leased_until"),
        *("ledger_slot", "provider", "started_at", "_started_steadily_at", "refused_by", "unable", "work"),
    )

    def __init__(
        self, lease: Lease, delivery: Delivery, policy: OnUncertain, *, confirmed_at: float, leased_until: float
    ) -> None:
        self.lease = lease
        self.delivery = delivery
        self.content = lease.email
        self.policy = lease.on_uncertain or policy
        self.state = State.PREPARING
        self.attempt_number = lease.attempt_number
        self.confirmed_at = confirmed_at
        self.leased_until = leased_until
        self.ledger_slot: int | None = None
        self.provider = ""
        self.started_at = self._started_steadily_at = 0.0
        self.refused_by: frozenset[str] = frozenset()
        self.unable: frozenset[str] = frozenset()
        self.work: asyncio.Future[Any] | asyncio.TimerHandle | None = None

    @property
    def email_id(self) -> UUID:
        """The email."""
        return self.lease.email_id

    def on(self, event: Event) -> None:
        """Moves to the next state.

        Raises:
            NotAllowed: the table has no such transition.
        """
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise NotAllowed(f"{event.name} came while the email was {self.state.name}.") from None

    def may(self, event: Event) -> bool:
        """Whether the table has a transition for this event now."""
        return (self.state, event) in TRANSITIONS

    def begin_attempt(self, provider: str) -> None:
        """An attempt over this provider begins now."""
        self.provider = provider
        self.started_at, self._started_steadily_at = time.time(), steady_clock()

    @property
    def attempted_until(self) -> float:
        """Now, unix seconds, counted from the attempt's beginning: no step of the host's clock makes it negative."""
        return self.started_at + (steady_clock() - self._started_steadily_at)

    def confirm(self, at: float, seconds: float) -> None:
        """A statement that was sent at this instant prolonged the lease by at least so long; never shortens it."""
        self.confirmed_at = max(self.confirmed_at, at)
        self.leased_until = max(self.leased_until, at + seconds)


class Ended(NamedTuple):
    """An email whose attempt has ended, on its way to be recorded.

    Attributes:
        retry_seconds: How long to wait before the next attempt, where the result is a deferral.
    """

    email: InFlightEmail
    result: Result
    retry_seconds: float


class Returned(NamedTuple):
    """An email whose lease is to be given back.

    Attributes:
        away_seconds: How long it stays out of the queue.
    """

    email: InFlightEmail
    away_seconds: float = 0.0
