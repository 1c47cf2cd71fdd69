"""The model's state, one immutable value: an email's row, its messages, two workers with ledgers, the relay's progress.

The model has no numbers that only grow, so the number of states is finite. Instead of a lease token, the model stores
whether the worker's token is still the row's token (`owns`). Instead of a time, it stores whether the lease has
expired. For a settlement, it stores whether the lease is unchanged.
"""

from __future__ import annotations

from enum import IntEnum, auto
from functools import cache
from typing import Final, NamedTuple

from dispatcher.domain.status import Status
from dispatcher.worker.in_flight_email import EmailState

MAX_ATTEMPTS: Final = 2
MAX_MESSAGES: Final = 2
WORKERS: Final = (0, 1)
NOBODY: Final = -1
GONE: Final = 2
"""The `locked_by` of a worker whose host and ledger are lost."""


_NO_MATTER_IF_CONFIRMED: Final = frozenset(
    {EmailState.STOPPED, EmailState.ANSWERED, EmailState.IN_DOUBT, EmailState.REFUSED}
)
"""The states in which the next statement confirms or ends the lease. So it makes no difference whether the lease was
confirmed before."""


class Step(IntEnum):
    """A worker's progress with a message. While the email is leased, `Worker.email` is its state."""

    IDLE = 0
    TAKEN = auto()
    """A message was delivered; the email is not leased yet."""
    UNANSWERED = auto()
    """The reply to the lease statement was lost."""
    LEASED = auto()
    """The email is leased, as far as the worker knows."""
    DEAD = auto()
    """The process has died; its ledger exists."""


class Answer(IntEnum):
    """An answer of the provider, in a ledger slot or in an attempt row, or the answer that the provider will give."""

    NONE = 0
    ON_THE_WIRE = auto()
    ACCEPTED = auto()
    DEFERRED = auto()
    REJECTED = auto()
    UNCERTAIN = auto()


class Stage(IntEnum):
    """The progress of the settlement of a live worker's lease."""

    NONE = 0
    FOUND = auto()
    """PostgreSQL says that the lease has expired."""
    VOIDED = auto()
    """The worker's ledger says that all leases confirmed earlier are void."""
    READ = auto()


class Late(IntEnum):
    """A statement that PostgreSQL may still execute although the worker has lost the connection."""

    NONE = 0
    LEASE = auto()
    RELEASE = auto()


class DeadLetter(IntEnum):
    NONE = 0
    DUE = auto()
    PUBLISHED = auto()


class Worker(NamedTuple):
    """A worker and its ledger.

    Attributes:
        not_allowed: An event happened for which the table of transitions has no row.
        outcome: The outcome of the current attempt, even before the answer arrives.
        owns: The worker's lease token is the row's token.
        confirmed: The lease was confirmed after the relay last voided it. The model has no worker clock, because no
            guarantee depends on it.
        has_message: The worker has a message that is not acked.
        attempted: The outcome of this attempt in `email_attempt`, under the worker's name.
        recovered: Recovery took the lease, and the email has not changed since the recovery.
        pinned: The worker knows that only the provider with idempotency keys may be tried.
        by_key: The current attempt is made at the provider with idempotency keys; also in the ledger slot.
    """

    step: Step = Step.IDLE
    email: EmailState = EmailState.DONE
    not_allowed: bool = False
    outcome: Answer = Answer.NONE
    attempt: int = 0
    owns: bool = False
    confirmed: bool = False
    has_message: bool = False
    slot: Answer = Answer.NONE
    attempted: Answer = Answer.NONE
    late: Late = Late.NONE
    recovered: bool = False
    pinned: bool = False
    by_key: bool = False


class LiveSettlement(NamedTuple):
    """The relay's settlement of an expired lease of a live worker: its last step, and what the relay read in the
    worker's slot. `is_current`: the lease still has the token and the expiry time that the relay found."""

    stage: Stage = Stage.NONE
    slot: Answer = Answer.NONE
    attempt: int = 0
    by_key: bool = False
    is_current: bool = False


_NO_SETTLEMENT: Final = LiveSettlement()


class Row(NamedTuple):
    """The email's row in `email_log`.

    Attributes:
        recovered_from: The worker from which recovery took the lease when recovery set the email to `held`. Cleared
            when the email changes.
        in_doubt: The email was published before a promotion that lost commits, and was not leased since the promotion.
        pinned: Only the provider with idempotency keys may be tried.
        proven: An event proves that the provider accepted the email, and has not settled it yet.
        is_over: The email's expires_at has passed, by the clocks of PostgreSQL and of the workers.
    """

    status: Status = Status.PENDING
    attempts: int = 0
    owner: int = NOBODY
    expired: bool = False
    due: bool = True
    dead_letter: DeadLetter = DeadLetter.NONE
    recovered_from: int = NOBODY
    in_doubt: bool = False
    pinned: bool = False
    proven: bool = False
    is_over: bool = False


class State(NamedTuple):
    """The whole state.

    Attributes:
        marking: The message is published, and the due mark is not cleared yet.
        accepted: How often a provider accepted the email.
        keyed: The provider with idempotency keys has accepted it, and accepts it no second time.
        resent: How often the policy or an operator had the email sent again although it may have been accepted.
        may_be_held: A ledger had the email as on the wire, or recovery had no ledger, or commits were lost.
        sent_after_event: A worker got a lease, or began a retry, after an event had proven the email.
        redelivered: The email was redelivered. The model has only one redelivery.
        cancelled: The email was cancelled or expired when no attempt could have been accepted.
        wrong: What a step did that no step may do; empty if there was no such step.
    """

    row: Row = Row()
    messages: int = 0
    marking: bool = False
    purged: bool = False
    workers: tuple[Worker, ...] = (Worker(), Worker())
    settlements: tuple[LiveSettlement, ...] = (LiveSettlement(), LiveSettlement())
    accepted: int = 0
    keyed: bool = False
    resent: int = 0
    may_be_held: bool = False
    promoted: bool = False
    sent_after_event: bool = False
    redelivered: bool = False
    cancelled: bool = False
    wrong: str = ""


def canonical(state: State) -> State:
    """The same state after `tidy`, with the workers sorted, because they are interchangeable."""
    state = tidy(state)
    (first, second), (settlement, other), row = state.workers, state.settlements, state.row
    if (first, settlement, row.owner == 0, row.recovered_from == 0) <= (
        second,
        other,
        row.owner == 1,
        row.recovered_from == 1,
    ):
        return state
    row = row._replace(owner=1 - row.owner) if row.owner in WORKERS else row
    row = row._replace(recovered_from=1 - row.recovered_from) if row.recovered_from in WORKERS else row
    return state._replace(row=row, workers=(second, first), settlements=(other, settlement))


def tidy(state: State) -> State:
    """The same state without values that can no longer have an effect."""
    is_sending = state.row.status is Status.SENDING
    first, second = state.workers
    settlement, other = state.settlements
    workers = (_relevant(first, is_sending=is_sending), _relevant(second, is_sending=is_sending))
    settlements = (
        settlement if is_sending and settlement.is_current else _NO_SETTLEMENT,
        other if is_sending and other.is_current else _NO_SETTLEMENT,
    )
    if workers == state.workers and settlements == state.settlements:
        return state
    return state._replace(workers=workers, settlements=settlements)


@cache
def _relevant(worker: Worker, *, is_sending: bool) -> Worker:
    """The worker without values that can no longer have an effect. Millions of states have only hundreds of workers."""
    step = worker.step
    if step is Step.DEAD:
        if worker.attempted is not Answer.NONE or worker.slot is Answer.NONE:
            return Worker(step, late=worker.late)  # the row's `recovered_from` still names the worker
        dead = worker._replace(email=EmailState.DONE, outcome=Answer.NONE)
        return dead._replace(owns=worker.owns and is_sending, confirmed=False, pinned=False)
    owns = worker.owns and is_sending
    if worker.email is EmailState.RELEASING:
        kept = worker._replace(outcome=Answer.NONE, slot=Answer.NONE, attempted=Answer.NONE, attempt=0)
        return kept._replace(owns=owns, confirmed=False, pinned=False, by_key=False)
    confirmed = worker.confirmed and worker.email not in _NO_MATTER_IF_CONFIRMED
    if owns is worker.owns and confirmed is worker.confirmed:
        return worker
    return worker._replace(owns=owns, confirmed=confirmed)
