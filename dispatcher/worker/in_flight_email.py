"""The state machine of a leased email in a worker, from its lease to its ack.

    leased ──▶ PREPARING ─MARK─▶ MARKED ─SEND─▶ ON_THE_WIRE ─ANSWER─▶ ANSWERED ─RECORD─▶ RECORDED ─FINISH─▶ DONE
                 │   ▲             │                 │                   │                  │ deferred: WAIT
                 │   └─────────────┴─────UNMARK──────┘                   ├▶ IN_DOUBT        ▼
                 │                                                       └▶ REFUSED      WAITING ─RESUME─▶ PREPARING
                 └─STOP─▶ STOPPED ─RELEASE─▶ RELEASING ─FINISH─▶ DONE

If the reply to the record statement is lost, the email is IN_DOUBT. If PostgreSQL refuses the result, the email is
REFUSED. From both states, RECORD leads to RECORDED. UNMARK is raised only if it is known that the provider did not
accept the email.

The table enforces these rules:

- An email reaches the wire only through MARKED: the worker writes the ledger slot, then checks the lease once more.
- The message of an email is acked only after RECORDED or RELEASING: a commit comes first.
- An email on the wire can be neither stopped nor released. A stopped email is never sent under the same lease.
- Only the first answer counts: later answers have no transition.

Only `InFlightEmail.on` writes the state. The send stage, with the modules that it uses, raises the events from WAIT to
ANSWER, and RELEASE. The record stage and the release stage raise all other events. `tests/model` searches every path
through this table.
"""

from __future__ import annotations

import asyncio
import math
import time
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from dispatcher.broker.consumer import Delivery
from dispatcher.domain.outcome import Pin
from dispatcher.domain.retry import RetryLimits
from dispatcher.domain.status import OnUncertain
from dispatcher.host.clock import steady_clock
from dispatcher.store.leases import DomainWait, Lease, Result

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class EmailState(IntEnum):
    """States of a leased email. An IntEnum, because the hash of an IntEnum is computed in C, which is faster."""

    PREPARING = auto()
    """An attempt has begun; nothing was sent."""
    WAITING = auto()
    """The email waits for its next attempt, or for memory."""
    STOPPED = auto()
    """The worker drains, the lease was lost, or the email is paused. Nothing was sent, and the worker sends nothing
    under this lease any more."""
    MARKED = auto()
    """The ledger says *on the wire*. Next, the worker checks that the lease is still valid."""
    ON_THE_WIRE = auto()
    """The provider may have received enough of the email to accept it. Only an answer or a deadline ends this state."""
    ANSWERED = auto()
    """The outcome is known, but not yet recorded."""
    IN_DOUBT = auto()
    """The reply to a record statement was lost; the outcome may be recorded already."""
    REFUSED = auto()
    """PostgreSQL refuses the result. The worker no longer renews the lease, so recovery takes the email over."""
    RECORDED = auto()
    """The result is committed. Next, the slot is cleared and the message acked."""
    RELEASING = auto()
    """The lease is being released."""
    DONE = auto()
    """The worker has finished with the email."""


class EmailEvent(IntEnum):
    WAIT = auto()
    """The email has to wait."""
    RESUME = auto()
    """The wait is over."""
    STOP = auto()
    """The email must no longer be sent."""
    MARK = auto()
    """The ledger slot is written."""
    SEND = auto()
    """The lease was valid after the slot was written."""
    UNMARK = auto()
    """The slot was cleared: nothing was sent, because the lease has ended, or it is known that the provider did not
    accept the email."""
    ANSWER = auto()
    """The attempt has an outcome."""
    LOSE_REPLY = auto()
    """The connection was lost while PostgreSQL recorded the result."""
    REFUSE = auto()
    """PostgreSQL cannot record the result."""
    RECORD = auto()
    """The result is committed."""
    RELEASE = auto()
    """The worker must release the lease."""
    FINISH = auto()
    """The commit that ends the lease is confirmed."""


TRANSITIONS: Final[Mapping[tuple[EmailState, EmailEvent], EmailState]] = {
    # The send stage.
    (EmailState.PREPARING, EmailEvent.WAIT): EmailState.WAITING,
    (EmailState.WAITING, EmailEvent.RESUME): EmailState.PREPARING,
    (EmailState.PREPARING, EmailEvent.MARK): EmailState.MARKED,
    (EmailState.MARKED, EmailEvent.SEND): EmailState.ON_THE_WIRE,
    (EmailState.MARKED, EmailEvent.UNMARK): EmailState.PREPARING,
    (EmailState.ON_THE_WIRE, EmailEvent.UNMARK): EmailState.PREPARING,
    (EmailState.PREPARING, EmailEvent.ANSWER): EmailState.ANSWERED,  # no request was made, for example without content
    (EmailState.STOPPED, EmailEvent.ANSWER): EmailState.ANSWERED,  # an adapter caught the cancellation
    (EmailState.ON_THE_WIRE, EmailEvent.ANSWER): EmailState.ANSWERED,
    # The record stage.
    (EmailState.ANSWERED, EmailEvent.RECORD): EmailState.RECORDED,
    (EmailState.ANSWERED, EmailEvent.LOSE_REPLY): EmailState.IN_DOUBT,
    (EmailState.ANSWERED, EmailEvent.REFUSE): EmailState.REFUSED,
    (EmailState.IN_DOUBT, EmailEvent.RECORD): EmailState.RECORDED,
    (EmailState.IN_DOUBT, EmailEvent.LOSE_REPLY): EmailState.IN_DOUBT,
    (EmailState.IN_DOUBT, EmailEvent.REFUSE): EmailState.REFUSED,
    (EmailState.REFUSED, EmailEvent.RECORD): EmailState.RECORDED,
    (EmailState.REFUSED, EmailEvent.LOSE_REPLY): EmailState.IN_DOUBT,
    (EmailState.REFUSED, EmailEvent.REFUSE): EmailState.REFUSED,
    (EmailState.RECORDED, EmailEvent.FINISH): EmailState.DONE,
    (EmailState.RECORDED, EmailEvent.WAIT): EmailState.WAITING,
    (EmailState.RECORDED, EmailEvent.RELEASE): EmailState.RELEASING,
    # The worker drains, the lease was lost, or the email is paused.
    (EmailState.PREPARING, EmailEvent.STOP): EmailState.STOPPED,
    (EmailState.WAITING, EmailEvent.STOP): EmailState.STOPPED,
    (EmailState.PREPARING, EmailEvent.RELEASE): EmailState.RELEASING,
    (EmailState.STOPPED, EmailEvent.RELEASE): EmailState.RELEASING,
    (EmailState.RELEASING, EmailEvent.FINISH): EmailState.DONE,
}


class NotAllowed(Exception):
    """The table has no transition for this event in this state: a bug in the worker."""


class LeaseExpired(Exception):
    """Raised by `Attempt.mark_on_wire`: the email must not be sent. It has expired, it was stopped, or another worker
    may have leased it by now. Caught inside the worker."""


class InFlightEmail:
    """A leased email.

    Attributes:
        delivery: The message that points to the email.
        content: The content to send; None until it is read, or if it was deleted.
        policy: What happens to the email if its outcome stays unknown.
        state: The current state. Only `on` writes it.
        attempt_number: The number of the current attempt. While the email waits: the number of the next attempt.
        confirmed_at: When the worker sent the last statement that confirmed the lease (`clock.steady_clock`).
        leased_until: The lease lasts at least until this time (`clock.steady_clock`).
        expires_at: When the email expires (`clock.steady_clock`); infinite if it never expires. No attempt begins at
            this time or later.
        ledger_slot: The attempt's slot in the in-flight ledger; None while the attempt has no slot.
        provider: The provider of the current attempt.
        started_at: When the attempt began, in Unix seconds.
        refused_by: Providers that have just refused the email, for a reason that concerns the provider and not the
            email. The next attempt prefers other providers.
        failovers: How many attempts have ended in a failover, in the current round of providers.
        suppressed: Why each suppressed recipient is left out, by position from 1 over To, Cc and Bcc. None if no
            recipient is suppressed.
        unable: Providers that must not be tried: the adapters found that these providers cannot send this email, or the
            email is pinned to a different provider.
        pin: The only provider that may be tried, because this provider may have accepted the email; None if any
            provider may be tried.
        work: What must be cancelled to stop the email: its task, the future of its bulk call, or the timer of its next
            attempt.
    """

    __slots__ = (
        *("lease", "delivery", "content", "policy", "state", "attempt_number", "confirmed_at", "leased_until"),
        *("ledger_slot", "provider", "started_at", "_started_steadily_at", "refused_by", "unable", "pin", "work"),
        *("failovers", "suppressed", "expires_at", "_leased_at"),
    )

    def __init__(
        self, lease: Lease, delivery: Delivery, policy: OnUncertain, *, confirmed_at: float, leased_until: float
    ) -> None:
        self.lease = lease
        self.delivery = delivery
        self.content = lease.email
        self.policy = lease.on_uncertain or policy
        self.state = EmailState.PREPARING
        self.attempt_number = lease.attempt_number
        self.confirmed_at = confirmed_at
        self.leased_until = leased_until
        # PostgreSQL calculated `expires_in` after `confirmed_at`, so `expires_at` is never too late.
        self.expires_at = math.inf if lease.expires_in is None else confirmed_at + lease.expires_in
        self._leased_at = confirmed_at
        self.ledger_slot: int | None = None
        self.provider = ""
        self.started_at = self._started_steadily_at = 0.0
        self.refused_by: frozenset[str] = frozenset()
        self.failovers = 0
        self.unable: frozenset[str] = frozenset()
        self.pin: Pin | None = None
        if lease.pinned_to is not None:
            self.pin = Pin(lease.pinned_to, confirmed_at - (lease.pinned_seconds or 0.0))
            self.provider = lease.pinned_to
        self.suppressed: Mapping[int, str] | None = None
        self.work: asyncio.Future[Any] | asyncio.TimerHandle | None = None

    @property
    def email_id(self) -> UUID:
        return self.lease.email_id

    def on(self, event: EmailEvent) -> None:
        """Moves the email to the next state. Raises NotAllowed if the table has no transition for this event."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise NotAllowed(f"The event {event.name} is not allowed while the email is {self.state.name}.") from None

    def may(self, event: EmailEvent) -> bool:
        return (self.state, event) in TRANSITIONS

    def begin_attempt(self, provider: str) -> None:
        self.provider = provider
        self.started_at, self._started_steadily_at = time.time(), steady_clock()

    @property
    def limits(self) -> RetryLimits | None:
        """The email's own retry limits, with the redelivery time that is left now; None if it has none."""
        limits = self.lease.limits
        if limits is None:
            return None
        return limits._replace(redeliver_seconds=limits.redeliver_seconds - (steady_clock() - self._leased_at))

    @property
    def attempt_pin(self) -> Pin:
        """A pin to the provider of the current attempt. Use it only if this is the email's first uncertain attempt."""
        return Pin(self.provider, self._started_steadily_at)

    @property
    def attempted_until(self) -> float:
        """The current time in Unix seconds: `started_at`, plus the monotonic time since the attempt began."""
        return self.started_at + (steady_clock() - self._started_steadily_at)

    def confirm(self, at: float, seconds: float) -> None:
        """Notes that PostgreSQL confirmed the lease: it lasts at least `seconds` after `at`, when the statement was
        sent (`clock.steady_clock`). Never shortens the lease."""
        self.confirmed_at = max(self.confirmed_at, at)
        self.leased_until = max(self.leased_until, at + seconds)


class EndedAttempt(NamedTuple):
    """An email whose attempt has ended and must be recorded. `retry_seconds`: the wait after a deferral."""

    email: InFlightEmail
    result: Result
    retry_seconds: float


class ReleaseRequest(NamedTuple):
    """An email whose lease must be released. `wait`: for a recipient domain whose ceiling is reached."""

    email: InFlightEmail
    delay_seconds: float = 0.0
    wait: DomainWait | None = None
