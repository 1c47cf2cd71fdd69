"""A simple model of one email, which computes the expected table contents after each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.domain.event import EventKind, OutgoingKind
from dispatcher.domain.failures import ItemOutcome
from dispatcher.domain.status import FINISHED, TRANSITIONS, OnUncertain, Status
from dispatcher.store.leases import Lease

MORTUARY: Final = (Status.FAILED, Status.HELD)
ALLOWED: Final = frozenset((before, after) for (before, _), after in TRANSITIONS.items())


@dataclass
class Known:
    """The expected state of one email.

    Attributes:
        expired_at: When the email's lease expired; None if the lease has not expired.
        expiries: How often the end of the email's lease was moved.
        due_since: The step at which the email became due to be published; None if the email is not due.
            `dead_letter_since` is the same for the dead letter.
        leases: All leases that the email ever had, each with its worker. Most of these leases are lost.
        rows: Number, outcome and worker of each attempt.
        announced: Its final statuses and what the provider reported, in order: the events that the feed must have.
        impossible: The kinds of events that were reported before any attempt.
        proven_by: The provider whose event waits to settle the email, or has settled it.
        times: `send_at` and `expires_at` of its payload.
        is_over: Whether its expires_at has passed.
        is_overdue: Whether its wait is over, if it is waiting.
        rescue_of: Worker, token and `was_uncertain` of the lease that recovery took away when it set the email to
            `held`.
    """

    email_id: UUID
    key: str
    policy: OnUncertain | None
    due_since: int | None
    times: dict[str, datetime | None]
    status: Status = Status.PENDING
    token: int = 0
    attempts: int = 0
    attempt_base: int = 0
    crashes: int = 0
    owner: str | None = None
    expired_at: datetime | None = None
    expiries: int = 0
    dead_letter_since: int | None = None
    is_discarded: bool = False
    was_uncertain: bool = False
    leases: list[tuple[str, Lease]] = field(default_factory=list)
    rows: list[tuple[int, str, str]] = field(default_factory=list)
    announced: list[str] = field(default_factory=list)
    rescue_of: tuple[str | None, int | None, bool] | None = None
    reported: set[EventKind] = field(default_factory=set)
    impossible: set[EventKind] = field(default_factory=set)
    proven_by: str | None = None
    has_expiry: bool = False
    is_over: bool = False
    is_overdue: bool = False
    cancelled_by: str | None = None

    @property
    def is_dead(self) -> bool:
        """Whether only an operator or evidence can change the email."""
        return self.status in MORTUARY

    def is_under(self, lease: Lease) -> bool:
        return self.status is Status.SENDING and self.token == lease.token

    def lease(self, worker: str) -> None:
        self.status, self.owner, self.due_since, self.expiries = Status.SENDING, worker, None, 0
        self.token += 1
        self.attempts += 1

    def close(self, status: Status, step: int) -> None:
        assert self.status is status or (self.status, status) in ALLOWED
        self.status, self.owner, self.expired_at = status, None, None
        self.due_since = step if status is Status.PENDING else None
        self.dead_letter_since = step if status in MORTUARY else None
        self.is_overdue = False
        if status in FINISHED:
            self.announced.append(status)

    def release(self, step: int, *, token_moves: bool) -> None:
        self.close(Status.PENDING, step)
        self.attempts -= 1
        self.token += token_moves

    def crash(self, step: int, most_crashes: int) -> None:
        """A worker died while it rendered the email."""
        self.crashes += 1
        self.close(Status.FAILED if self.crashes >= most_crashes else Status.PENDING, step)
        self.attempts, self.token = self.attempts - 1, self.token + 1

    @property
    def rescued_token(self) -> int | None:
        """The token of the lease that recovery took away, if recovery set the email to `held` and the email has not
        changed since the recovery."""
        token = self.rescue_of[1] if self.rescue_of else None
        is_untouched = token is not None and self.token == token + 1 and not self.is_discarded
        return token if self.status is Status.HELD and is_untouched else None

    def recover(self, step: int) -> None:
        """The relay reverts the recovery, because the email was not accepted."""
        assert self.rescue_of is not None
        self.was_uncertain = self.rescue_of[2]
        self.close(Status.PENDING, step)
        self.attempt_base += 1
        self._confirm_rescue()

    def record_after_rescue(self, status: Status, outcome: str, step: int) -> None:
        """A worker records a result under a lease that recovery has taken away."""
        assert self.rescue_of is not None
        if outcome != "uncertain":
            self.was_uncertain = self.rescue_of[2]
            self.close(Status.PENDING if status is Status.SENDING else status, step)
            self._redeliver(status)
        self._confirm_rescue()

    def _confirm_rescue(self) -> None:
        if self.rescue_of is not None:
            self.rescue_of = (self.rescue_of[0], None, self.rescue_of[2])

    def record(self, status: Status, outcome: str, step: int) -> None:
        self.was_uncertain |= outcome == "uncertain"
        self._confirm_rescue()
        if status is Status.SENDING:
            self.attempts, self.expired_at = self.attempts + 1, None
        else:
            self.close(status, step)
            self._redeliver(status)

    def _redeliver(self, status: Status) -> None:
        """If the email waits for a redelivery, its attempts count from 1 again."""
        if status is Status.WAITING:
            self.attempt_base = self.attempts

    @property
    def may_be_leased(self) -> bool:
        return self.status is Status.PENDING and self.proven_by is None and not self.is_over

    @property
    def is_unsent(self) -> bool:
        return self.status in (Status.PENDING, Status.WAITING) and self.proven_by is None

    def cancel(self, why: str, step: int) -> None:
        if why == "expired":
            self._confirm_rescue()
        self.close(Status.CANCELLED, step)
        self.cancelled_by = why

    def reschedule(self, step: int, *, is_overdue: bool) -> None:
        """The email waits, perhaps for a time that has passed."""
        self.close(Status.WAITING, step)
        self.is_overdue = is_overdue

    @property
    def may_be_accepted(self) -> bool:
        """Whether a worker may have sent the email. An event that settled it has named the provider."""
        return self.attempts > 0 or bool(self.rows) or (self.status is Status.SENT and self.proven_by is not None)

    def report(self, kind: EventKind, provider: str) -> None:
        self.reported.add(kind)
        if kind.value in tuple(OutgoingKind):
            self.announced.append(kind)
        if self.status is not Status.SENT:
            self.proven_by = provider

    @property
    def is_settleable(self) -> bool:
        """Whether an event waits to settle the email, and no worker has leased it."""
        return self.proven_by is not None and self.status not in (Status.SENT, Status.SENDING)

    def settle(self, step: int) -> None:
        self._confirm_rescue()
        if EventKind.REJECTED not in self.reported or self.reported - {EventKind.ACCEPTED, EventKind.REJECTED}:
            self.close(Status.SENT, step)
            return
        self.proven_by = None
        if self.status is Status.PENDING:
            self.due_since = step
        elif self.status is Status.HELD:
            self.status = Status.FAILED
            self.announced.append(Status.FAILED)
            self.dead_letter_since = None if self.is_discarded else step

    def rescue(self, default: OnUncertain, max_attempts: int, step: int) -> None:
        """The lease expired without a result, and recovery resends the email or sets it to `held`."""
        resends = (self.policy or default) is OnUncertain.RESEND and self.attempts - self.attempt_base < max_attempts
        self.rescue_of = None if resends else (self.owner, self.token, self.was_uncertain)
        self.close(Status.PENDING if resends else Status.HELD, step)
        self.token += 1
        self.was_uncertain = True

    def replay(self, step: int) -> None:
        self.close(Status.PENDING, step)
        self.attempt_base, self.crashes, self.is_discarded = self.attempts, 0, False

    def replay_outcome(self, *, include_held: bool) -> ItemOutcome:
        if self.status is Status.SENT:
            return ItemOutcome.ALREADY_SENT
        if not self.is_dead:
            return ItemOutcome.CANCELLED if self.status is Status.CANCELLED else ItemOutcome.UNDER_WAY
        if self.is_over:
            return ItemOutcome.EXPIRED
        if (self.status is Status.HELD or self.was_uncertain) and not include_held:
            return ItemOutcome.MAY_HAVE_ARRIVED
        return ItemOutcome.REPLAYED
