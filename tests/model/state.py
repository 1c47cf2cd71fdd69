"""One email, its row, its messages, two workers with their ledgers, and what the relay has seen: one frozen value.

Numbers that only grow are kept as what they mean, so that there are finitely many states: a lease token as whether it
is still the row's (`owns`), time as whether a lease still runs, a look as whether the lease is as it was seen.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final, NamedTuple

from dispatcher.domain.status import Status
from dispatcher.worker.in_flight_email import State as InFlight

MAX_ATTEMPTS: Final = 2
MOST_MESSAGES: Final = 2
WORKERS: Final = (0, 1)
NOBODY: Final = -1
GONE: Final = 2
"""`locked_by` names a worker whose host is gone, and its ledger with it."""


_NO_MATTER_IF_CONFIRMED: Final = frozenset({InFlight.STOPPED, InFlight.ANSWERED, InFlight.IN_DOUBT, InFlight.REFUSED})
"""States that the email leaves by a statement that confirms its lease, or for good."""


class Step(IntEnum):
    """How far a worker is with a message; once it has a lease, `Worker.email` says how far the email is."""

    IDLE = 0
    TAKEN = auto()
    """A message was delivered; no lease yet."""
    UNANSWERED = auto()
    """The reply to its lease was lost."""
    IN_HAND = auto()
    """It is leased, as far as the worker knows."""
    DEAD = auto()
    """The process is gone, its ledger is not."""


class Answer(IntEnum):
    """What a ledger slot says, what an attempt row says, or what the provider will say."""

    NONE = 0
    ON_THE_WIRE = auto()
    ACCEPTED = auto()
    DEFERRED = auto()
    REJECTED = auto()
    UNCERTAIN = auto()


class Stage(IntEnum):
    """How far the settlement of a living worker's lease is."""

    NONE = 0
    FOUND = auto()
    """PostgreSQL says that the lease has run out."""
    VOIDED = auto()
    """The worker's ledger says that what was confirmed before is void."""
    READ = auto()


class Late(IntEnum):
    """A statement whose reply was lost, and that PostgreSQL may still execute."""

    NONE = 0
    LEASE = auto()
    RELEASE = auto()


class DeadLetter(IntEnum):
    """Its dead letter: none, due, or on the DLQ."""

    NONE = 0
    DUE = auto()
    PUBLISHED = auto()


class Worker(NamedTuple):
    """A worker and its ledger.

    Attributes:
        email: The email's state in the worker: the product's own.
        not_allowed: Something happened to the email for which the table of transitions has no row.
        outcome: What came, or will come, of the attempt under way.
        attempt: Its number.
        owns: Its lease token is the row's.
        confirmed: Its lease was confirmed after the relay last voided it. What its clock says is left out: nothing
            rests on it.
        has_message: It holds a message that is not acked.
        slot: What its ledger says of the email.
        attempted: The outcome of this attempt that `email_attempt` has in the worker's name.
        rescued: A rescue took its lease, and nobody has touched the email since.
    """

    step: Step = Step.IDLE
    email: InFlight = InFlight.DONE
    not_allowed: bool = False
    outcome: Answer = Answer.NONE
    attempt: int = 0
    owns: bool = False
    confirmed: bool = False
    has_message: bool = False
    slot: Answer = Answer.NONE
    attempted: Answer = Answer.NONE
    late: Late = Late.NONE
    rescued: bool = False


class Look(NamedTuple):
    """How far the relay of a worker's host is with an expired lease.

    Attributes:
        stage: The last step it took.
        slot: What the ledger said.
        attempt: Of which attempt.
        fits: The lease is still the one that it found, by token and end.
    """

    stage: Stage = Stage.NONE
    slot: Answer = Answer.NONE
    attempt: int = 0
    fits: bool = False


class Row(NamedTuple):
    """Its row of `email_log`.

    Attributes:
        rescued: From which worker the rescue took it that holds it, as long as nobody has touched it since.
        unsure: It was published before a promotion that lost commits, and not leased since.
    """

    status: Status = Status.PENDING
    attempts: int = 0
    owner: int = NOBODY
    expired: bool = False
    due: bool = True
    dead_letter: DeadLetter = DeadLetter.NONE
    rescued: int = NOBODY
    unsure: bool = False


class State(NamedTuple):
    """Everything.

    Attributes:
        messages: How many wait on the send queue.
        marking: Its message is published, and the due mark is to be cleared.
        purged: RabbitMQ has lost messages.
        accepted: How often the provider accepted it: the ledger at the provider's end.
        resent: How often it was sent again although it may have been accepted, by policy or by a person.
        may_be_held: A ledger once said that it is on the wire, or it was rescued without one, or commits were lost.
        promoted: PostgreSQL has lost commits.
    """

    row: Row = Row()
    messages: int = 0
    marking: bool = False
    purged: bool = False
    workers: tuple[Worker, ...] = (Worker(), Worker())
    looks: tuple[Look, ...] = (Look(), Look())
    accepted: int = 0
    resent: int = 0
    may_be_held: bool = False
    promoted: bool = False


def canonical(state: State) -> State:
    """The same state, `tidy`, and with the workers in order: which of the two is the first makes no difference."""
    state = tidy(state)
    (first, second), (look, other), row = state.workers, state.looks, state.row
    if (first, look, row.owner == 0, row.rescued == 0) <= (second, other, row.owner == 1, row.rescued == 1):
        return state
    row = row._replace(owner=1 - row.owner) if row.owner in WORKERS else row
    row = row._replace(rescued=1 - row.rescued) if row.rescued in WORKERS else row
    return state._replace(row=row, workers=(second, first), looks=(other, look))


def tidy(state: State) -> State:
    """The same state without what can never matter again."""
    is_sending = state.row.status is Status.SENDING
    first, second = state.workers
    look, other = state.looks
    return state._replace(
        workers=(_relevant(first, is_sending=is_sending), _relevant(second, is_sending=is_sending)),
        looks=(look if is_sending and look.fits else Look(), other if is_sending and other.fits else Look()),
    )


def _relevant(worker: Worker, *, is_sending: bool) -> Worker:
    step = worker.step
    if step is Step.DEAD:
        if worker.attempted is not Answer.NONE or worker.slot is Answer.NONE:
            return Worker(step, late=worker.late)  # what was rescued from it is found by its name
        dead = worker._replace(email=InFlight.DONE, outcome=Answer.NONE)
        return dead._replace(owns=worker.owns and is_sending, confirmed=False)
    owns = worker.owns and is_sending
    if worker.email is InFlight.RETURNING:
        kept = worker._replace(outcome=Answer.NONE, slot=Answer.NONE, attempted=Answer.NONE, attempt=0)
        return kept._replace(owns=owns, confirmed=False)
    confirmed = worker.confirmed and worker.email not in _NO_MATTER_IF_CONFIRMED
    if owns is worker.owns and confirmed is worker.confirmed:
        return worker
    return worker._replace(owns=owns, confirmed=confirmed)
