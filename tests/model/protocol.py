"""Computes all possible next steps from a state: of the protocol, the servers, time, and faults.

Each step is one commit, one ledger write, or one message on a connection. Other steps may happen between any two
steps. So a stopped, frozen or slow process needs no separate treatment: it takes no step while other processes take
steps. A step that changes the email's status has the transition of `dispatcher/domain/status.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from dispatcher.domain.status import OnUncertain, Status, Transition
from dispatcher.worker.in_flight_email import TRANSITIONS, EmailEvent, EmailState
from tests.model.state import (
    GONE,
    MAX_ATTEMPTS,
    MAX_MESSAGES,
    NOBODY,
    WORKERS,
    Answer,
    DeadLetter,
    Late,
    LiveSettlement,
    Row,
    Stage,
    State,
    Step,
    Worker,
)


class Fault(Enum):
    """The faults, which may each occur any number of times."""

    DEATH = "a worker's process dies"
    HOST = "a worker's host dies, and its ledger is lost"
    RELAY = "a relay dies between two steps, or is slower than the grace period"
    CHANNEL = "a channel is lost, and its messages are redelivered"
    COPY = "a message is duplicated"
    PURGE = "RabbitMQ loses its messages"
    REPLY = "PostgreSQL commits, and the reply is lost"
    LATE = "the connection is lost, and PostgreSQL executes the statement later"
    REFUSAL = "an adapter refuses an email, a provider takes nothing, or PostgreSQL refuses the result"
    OPERATOR = "an operator replays a failed or held email"
    EVENT = "the provider reports an event: late, or never; it proves that the provider accepted the email"
    CANCEL = "the application cancels the email"
    RESCHEDULE = "the application reschedules the email, at any time and any number of times"
    EXPIRY = "the email's expires_at passes"
    CEILING = "a worker puts the email aside, because a ceiling of its recipient's domain is reached"
    PROMOTION = "a promoted standby lacks every commit since the enqueue; tolerated only without other faults"


ALL_FAULTS: Final = frozenset(Fault) - {
    Fault.PROMOTION,
    Fault.EVENT,
    Fault.CANCEL,
    Fault.RESCHEDULE,
    Fault.EXPIRY,
    Fault.CEILING,
}
"""The faults that a search allows at once. With events, it would have three times as many states."""


UNSENT: Final = frozenset({Status.PENDING, Status.WAITING})
_NEW_WORKER: Final = Worker()._asdict()


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol's rules. A mutant switches off one rule.

    Attributes:
        ledger: A worker writes its in-flight ledger.
        tokens: A write under a lost lease changes nothing, unless it records an acceptance.
        ack_after_commit: The worker acks a message after the commit; otherwise on delivery.
        voids: The relay voids a live worker's leases before it reads the ledger.
        keys: There are two providers, and one of them has idempotency keys; otherwise only one, without keys. No key
            expires.
        pins: A pinned email is tried only at the provider with keys; otherwise at both.
        proof_stops_leases: An email that an event proves to be accepted is not leased.
        redelivers: A deferral without attempts left is redelivered later, once; otherwise the email fails.
        wakes: The relay wakes waiting emails.
        cancel_takes: The statuses from which an email is cancelled.
        expiry_stops_sends: No first byte leaves after the email has expired.
        table: The product's table of email states. Some mutants remove a row.
    """

    policy: OnUncertain = OnUncertain.HOLD
    faults: frozenset[Fault] = ALL_FAULTS
    ledger: bool = True
    tokens: bool = True
    ack_after_commit: bool = True
    voids: bool = True
    keys: bool = False
    pins: bool = True
    proof_stops_leases: bool = True
    redelivers: bool = False
    wakes: bool = True
    cancel_takes: frozenset[Status] = UNSENT
    expiry_stops_sends: bool = True
    table: Mapping[tuple[EmailState, EmailEvent], EmailState] = field(default_factory=lambda: TRANSITIONS)


class Change(NamedTuple):
    """One step. `transition`: None if the status does not change. `fault`: None for a regular step."""

    text: str
    after: State
    transition: Transition | None = None
    fault: Fault | None = None


def changes(state: State, rules: Rules) -> Iterator[Change]:
    for change in _all_changes(state, rules):
        if change.fault is None or change.fault in rules.faults:
            yield change


def _all_changes(state: State, rules: Rules) -> Iterator[Change]:
    yield from _relay(state, rules)
    yield from _servers(state, rules)
    yield from _events(state)
    yield from _time(state, rules)
    # The next states of faults that may not occur are costly to compute, and would be discarded.
    if Fault.OPERATOR in rules.faults:
        yield from _operators(state)
    if Fault.PROMOTION in rules.faults:
        yield from _promotion(state)
    if Fault.CANCEL in rules.faults:
        yield _cancel(state, rules)
    for i in WORKERS:
        yield from _worker(state, i, rules)
        yield from _settlement(state, i, rules)


# These functions are the common parts of all writes to the row.


def _worker_is(state: State, i: int, **fields: Any) -> State:
    workers = list(state.workers)
    workers[i] = workers[i]._replace(**fields)
    return state._replace(workers=tuple(workers))


def _row_is(state: State, **fields: Any) -> State:
    row = state.row._replace(**fields)
    # If a row becomes due again after it was published, the row stays due. If a row is no longer due, its due mark
    # needs no clearing.
    marking = state.marking and "due" not in fields
    return state._replace(row=row, marking=marking)


def _token_moves(state: State, owner: int | None = None) -> State:
    """The row gets a new token, which only `owner` has. All other workers' tokens are then old."""
    workers = tuple(
        w._replace(owns=i == owner, late=Late.NONE if w.late is Late.RELEASE else w.late)
        for i, w in enumerate(state.workers)
    )
    return _lease_changed(state)._replace(workers=workers)


def _lease_changed(state: State) -> State:
    settlements = tuple(settlement._replace(is_current=False) for settlement in state.settlements)
    return state._replace(settlements=settlements)


def _lease_prolonged(state: State) -> State:
    return _lease_changed(_row_is(state, expired=False))


def _closed(state: State, status: Status, **fields: Any) -> State:
    """The lease ends, and the email gets this status."""
    dead_letter = DeadLetter.DUE if status in (Status.FAILED, Status.HELD) else DeadLetter.NONE
    proven = state.row.proven and status is not Status.SENT
    fields = {"due": status is Status.PENDING, "in_doubt": False, "pinned": False, "proven": proven, **fields}
    state = _row_is(state, status=status, owner=NOBODY, expired=False, dead_letter=dead_letter, **fields)
    return _recovery_is_final(state)


def _recovery_is_final(state: State) -> State:
    """An earlier recovery becomes final: no later record undoes the recovery."""
    workers = tuple(worker._replace(recovered=False) if worker.recovered else worker for worker in state.workers)
    return _row_is(state, recovered_from=NOBODY)._replace(workers=workers, marking=state.marking)


def _released(state: State, **fields: Any) -> State:
    """The lease is released, and its attempt does not count."""
    fields = {"attempts": max(0, state.row.attempts - 1), "pinned": state.row.pinned, **fields}
    return _closed(state, Status.PENDING, **fields)


def _decided(
    state: State, answer: Answer, attempt: int, rules: Rules, *, is_in_doubt: bool = False
) -> tuple[Status, Transition]:
    """The email's new status for an outcome, if no owner can retry (`domain/decision.py`, `store/results.py`)."""
    has_attempts_left = attempt < MAX_ATTEMPTS
    match answer:
        case Answer.ACCEPTED:
            late = state.row.status is not Status.SENDING
            return Status.SENT, Transition.EVIDENCE if late else Transition.ACCEPT
        case Answer.DEFERRED | Answer.UNCERTAIN if is_in_doubt and has_attempts_left:
            return Status.PENDING, Transition.RELEASE
        case Answer.UNCERTAIN if is_in_doubt:
            return Status.HELD, Transition.HOLD
        case Answer.DEFERRED | Answer.REJECTED if is_in_doubt:
            return Status.HELD, Transition.HOLD
        case Answer.DEFERRED if has_attempts_left:
            return Status.PENDING, Transition.RELEASE
        case Answer.DEFERRED if rules.redelivers and not state.redelivered and not state.row.is_over:
            return Status.WAITING, Transition.REDELIVER
        case Answer.DEFERRED | Answer.REJECTED:
            return Status.FAILED, Transition.FAIL
        case _ if rules.policy is OnUncertain.RESEND and has_attempts_left:
            return Status.PENDING, Transition.RESEND
        case _:
            return Status.HELD, Transition.HOLD


def _recorded(
    state: State,
    answer: Answer,
    attempt: int,
    rules: Rules,
    *,
    owns: bool,
    owner: int | None = None,
    owner_recovered: bool = False,
    pinned: bool = False,
    by_key: bool = False,
) -> tuple[State, Transition | None]:
    """Models the `record` statement; returns the next state, and the transition if the status changes. `owns`: the
    worker records with the row's token. `owner`: the worker that keeps the lease and retries a deferred email; None if
    no worker can retry. `owner_recovered`: recovery took the lease from this worker."""
    row = state.row
    is_in_doubt = pinned or (by_key and answer is Answer.UNCERTAIN)
    if owner_recovered and row.status is Status.HELD and answer is not Answer.ACCEPTED:
        return _recorded_after_recovery(state, answer, attempt, rules, is_in_doubt=is_in_doubt)
    status, transition = _decided(state, answer, attempt, rules, is_in_doubt=is_in_doubt)
    is_ours = row.status is Status.SENDING and (owns or not rules.tokens)
    if answer is Answer.ACCEPTED and not owns:
        transition = Transition.EVIDENCE
    if not is_ours and not (status is Status.SENT and row.status is not Status.SENT):
        return state, None
    if transition is Transition.RELEASE and owner is not None:
        if row.proven:
            return state, None
        state = state._replace(sent_after_event=state.sent_after_event or row.proven)
        deferred = _row_is(state, attempts=min(row.attempts + 1, MAX_ATTEMPTS), pinned=is_in_doubt)
        state = _lease_prolonged(deferred)
        return _worker_is(state, owner, confirmed=True, pinned=is_in_doubt), Transition.DEFER
    if transition is Transition.RESEND:
        state = state._replace(resent=state.resent + 1)
    if transition is Transition.REDELIVER:
        return _closed(state._replace(redelivered=True), status, attempts=0), transition
    return _closed(state, status, pinned=is_in_doubt and transition is Transition.RELEASE), transition


def _recorded_after_recovery(
    state: State, answer: Answer, attempt: int, rules: Rules, *, is_in_doubt: bool
) -> tuple[State, Transition | None]:
    """The `record` statement for a lease that recovery took, if the email has not changed since the recovery."""
    status, _ = _decided(state, answer, attempt, rules, is_in_doubt=is_in_doubt)
    if answer is Answer.UNCERTAIN or status is Status.HELD:
        return _recovery_is_final(state), None
    if status is Status.WAITING:
        return _closed(state._replace(redelivered=True), status, attempts=0), Transition.REDELIVER
    after = _closed(state, status, pinned=is_in_doubt)
    return after, Transition.FAIL if status is Status.FAILED else Transition.RECOVER


# The steps of the relay, which publishes due emails and dead letters, and recovers expired leases and lost messages.


def _relay(state: State, rules: Rules) -> Iterator[Change]:
    row = state.row
    if row.due and not row.is_over and not state.marking and _messages(state) < MAX_MESSAGES:
        yield Change("relay: publishes the email's message", state._replace(messages=state.messages + 1, marking=True))
    if state.marking:
        yield Change("relay: clears the email's due mark", _row_is(state, due=False))
        yield Change("relay dies before it clears the due mark", state._replace(marking=False), fault=Fault.RELAY)
    if row.dead_letter is DeadLetter.DUE:
        yield Change("relay: publishes the email's dead letter", _row_is(state, dead_letter=DeadLetter.PUBLISHED))
    if row.in_doubt:
        yield from _judges_in_doubt(state, rules)
    elif row.status is Status.PENDING and not row.due and state.messages == 0:
        fault = None if state.purged else Fault.PURGE
        yield Change("relay: finds the message lost, makes the email due again", _row_is(state, due=True), fault=fault)
    if row.status is Status.SENDING and row.expired:
        after, transition = _recovered_by_policy(state, rules)
        fault = None if row.owner == GONE else Fault.RELAY
        yield Change("relay: recovers the email without a ledger", after, transition, fault)


def _judges_in_doubt(state: State, rules: Rules) -> Iterator[Change]:
    """After a promotion that lost commits, the relay resends or holds an email in doubt, depending on the policy. The
    relay waits until no message and no worker has the email, because a worker may still record a result."""
    if state.messages or any(worker.step is not Step.IDLE for worker in state.workers):
        return
    if rules.policy is OnUncertain.RESEND:
        after = _row_is(state, due=True, in_doubt=False)._replace(resent=state.resent + 1)
        yield Change("relay: makes the email due again, which may have been sent before commits were lost", after)
    else:
        text = "relay: holds the email, which may have been sent before commits were lost"
        yield Change(text, _closed(state, Status.HELD), Transition.HOLD)


def _recovered_by_policy(state: State, rules: Rules) -> tuple[State, Transition | None]:
    after, transition = _recorded(state, Answer.UNCERTAIN, state.row.attempts, rules, owns=True)
    if transition is Transition.HOLD:
        workers = tuple(worker._replace(recovered=worker.owns) for worker in after.workers)
        after = _row_is(after, recovered_from=state.row.owner)._replace(workers=workers)
    after = _row_is(after, pinned=state.row.pinned)
    if Fault.CANCEL in rules.faults and state.row.owner in WORKERS:
        after = _worker_is(after, state.row.owner, confirmed=False)
    return _token_moves(after)._replace(may_be_held=True), transition


# The relay of each host records the ledgers of the host's live and dead workers, and ends the workers' leases.


def _settlement(state: State, i: int, rules: Rules) -> Iterator[Change]:
    row, settlement, worker = state.row, state.settlements[i], state.workers[i]
    if settlement.stage is not Stage.NONE:
        yield _settles_living(state, i, rules)
        after = _settlement_is(state, i, LiveSettlement())
        yield Change(f"relay of worker {i} dies between two steps", after, fault=Fault.RELAY)
    elif worker.step is Step.DEAD:
        yield _settles_dead(state, i, rules)
    elif row.status is Status.SENDING and row.expired and row.owner == i:
        after = _settlement_is(state, i, LiveSettlement(Stage.FOUND, is_current=True))
        yield Change(f"relay: finds that worker {i}'s lease has expired", after)


def _settlement_is(state: State, i: int, settlement: LiveSettlement) -> State:
    settlements = list(state.settlements)
    settlements[i] = settlement
    return state._replace(settlements=tuple(settlements))


def _settles_living(state: State, i: int, rules: Rules) -> Change:
    """The relay finds an expired lease, voids the worker's leases, reads the ledger, and ends the lease. Each of these
    is one step."""
    settlement, worker = state.settlements[i], state.workers[i]
    match settlement.stage:
        case Stage.FOUND:
            after = _settlement_is(state, i, settlement._replace(stage=Stage.VOIDED))
            after = _worker_is(after, i, confirmed=worker.confirmed and not rules.voids)
            return Change(f"relay: voids worker {i}'s leases", after)
        case Stage.VOIDED:
            slot = worker.slot if worker.owns else Answer.NONE
            read = settlement._replace(stage=Stage.READ, slot=slot, attempt=worker.attempt, by_key=worker.by_key)
            after = _settlement_is(state, i, read)
            return Change(f"relay: reads worker {i}'s ledger: {_said(slot)}", after)
        case _:
            after, transition = _settled_living(_settlement_is(state, i, LiveSettlement()), i, settlement, rules)
            return Change(f"relay: settles worker {i}'s lease: {_said(settlement.slot)}", after, transition)


def _settled_living(state: State, i: int, settlement: LiveSettlement, rules: Rules) -> tuple[State, Transition | None]:
    is_expired = state.row.status is Status.SENDING and state.row.expired
    if not (is_expired and (settlement.is_current or not rules.tokens)):
        return state, None
    if settlement.slot is Answer.NONE:
        return _token_moves(_released(state)), Transition.RELEASE
    answer = Answer.UNCERTAIN if settlement.slot is Answer.ON_THE_WIRE else settlement.slot
    doubt = {"pinned": state.row.pinned, "by_key": settlement.by_key}
    return _recorded(state, answer, settlement.attempt, rules, owns=True, **doubt)


def _settles_dead(state: State, i: int, rules: Rules) -> Change:
    """First the dead worker's PostgreSQL sessions end. Then the relay records the ledger. Then the relay releases the
    remaining leases."""
    worker = state.workers[i]
    if worker.slot is not Answer.NONE and worker.attempted is Answer.NONE:
        answer = Answer.UNCERTAIN if worker.slot is Answer.ON_THE_WIRE else worker.slot
        doubt = {"pinned": state.row.pinned, "by_key": worker.by_key}
        after, transition = _recorded(
            state, answer, worker.attempt, rules, owns=worker.owns, owner_recovered=worker.recovered, **doubt
        )
        text = f"relay: records the content of dead worker {i}'s ledger: {_said(worker.slot)}"
        return Change(text, _worker_is(after, i, attempted=answer, late=Late.NONE), transition)
    fresh = _worker_is(state, i, **Worker()._asdict())
    if state.row.status is Status.SENDING and state.row.owner == i:
        after = _token_moves(_released(fresh))
        return Change(f"relay: releases dead worker {i}'s lease", after, Transition.RELEASE)
    if _is_recovered(state, i):
        after = _released(fresh)
        return Change(f"relay: undoes the recovery of dead worker {i}'s lease", after, Transition.RECOVER)
    return Change(f"relay: dead worker {i}'s ledger is settled", fresh)


def _is_recovered(state: State, i: int) -> bool:
    """Whether, according to the row, recovery took the lease from this worker."""
    return state.row.status is Status.HELD and state.row.recovered_from == i


def _said(slot: Answer) -> str:
    return "not named" if slot is Answer.NONE else slot.name.lower().replace("_", " ")


# The steps of time, RabbitMQ, and operators.


def _messages(state: State) -> int:
    return state.messages + sum(worker.has_message for worker in state.workers)


def _servers(state: State, rules: Rules) -> Iterator[Change]:
    row = state.row
    if row.status is Status.SENDING and not row.expired:
        yield Change("the lease expires", _row_is(state, expired=True))
    if state.messages and _messages(state) < MAX_MESSAGES:
        after = state._replace(messages=state.messages + 1)
        yield Change("RabbitMQ duplicates the message", after, fault=Fault.COPY)
    if Fault.PURGE in rules.faults and _messages(state) and not state.purged:
        workers = tuple(w._replace(has_message=False) for w in state.workers)
        after = state._replace(messages=0, purged=True, workers=workers)
        yield Change("RabbitMQ loses its messages", after, fault=Fault.PURGE)


def _promotion(state: State) -> Iterator[Change]:
    """A standby is promoted: the email's row is again as it was enqueued, and the lease and its token are lost. The
    relay has detected the promotion."""
    if state.promoted:
        return
    workers = tuple(w._replace(owns=False, recovered=False, attempted=Answer.NONE) for w in state.workers)
    settlements = (LiveSettlement(), LiveSettlement())
    row = Row(due=False, in_doubt=True)
    after = state._replace(row=row, marking=False, workers=workers, settlements=settlements)
    text = "PostgreSQL: a standby without the commits since the enqueue is promoted"
    # If the commit of a cancellation is lost, its answer promises nothing.
    yield Change(text, after._replace(promoted=True, may_be_held=True, cancelled=False), fault=Fault.PROMOTION)


def _events(state: State) -> Iterator[Change]:
    """The provider reports what happened after it had accepted the email. Then the intake or the relay settles it."""
    row = state.row
    if state.accepted and not row.proven and row.status is not Status.SENT:
        yield Change("an event proves that the email was accepted", _row_is(state, proven=True), fault=Fault.EVENT)
    if row.proven and row.status is not Status.SENDING:
        yield Change("the event settles the email", _closed(state, Status.SENT), Transition.EVIDENCE)


def _time(state: State, rules: Rules) -> Iterator[Change]:
    """The steps of scheduled, redelivered and expired emails."""
    row = state.row
    if row.status is Status.WAITING and rules.wakes:
        yield Change("relay: wakes the email", _row_is(state, status=Status.PENDING, due=True), Transition.WAKE)
    is_unsent = row.status in UNSENT and not row.proven and not row.in_doubt
    # A second message of the email is a second fault for a promotion that loses commits.
    has_one_message = Fault.PROMOTION not in rules.faults or state.promoted or not _messages(state)
    if Fault.RESCHEDULE in rules.faults and is_unsent and has_one_message:
        after = _row_is(state, status=Status.WAITING, owner=NOBODY, expired=False, due=False, in_doubt=False)
        yield Change("the email is rescheduled", after, Transition.RESCHEDULE, fault=Fault.RESCHEDULE)
    if Fault.EXPIRY in rules.faults and not row.is_over and row.status is not Status.SENT:
        # `marking` stays as it is: nothing writes the row.
        after = state._replace(row=row._replace(is_over=True))
        yield Change("the email's expires_at passes", after, fault=Fault.EXPIRY)
    if row.is_over and row.status in (*UNSENT, Status.HELD) and not row.proven:
        after = _closed(state, Status.CANCELLED)
        after = after._replace(cancelled=state.cancelled or row.status is not Status.HELD)
        yield Change("relay: cancels the expired email", after, Transition.EXPIRE)


def _cancel(state: State, rules: Rules) -> Change:
    """The application cancels the email. The row decides the answer."""
    row = state.row
    if row.status in rules.cancel_takes and not row.proven and not row.in_doubt:
        after = _closed(state, Status.CANCELLED)._replace(cancelled=True)
        if row.proven:
            after = after._replace(wrong='"cancelled" was the answer, although an event had proven the email')
        return Change('the email is cancelled: "cancelled"', after, Transition.CANCEL, fault=Fault.CANCEL)
    was_on_its_way = row.status not in UNSENT or row.in_doubt or state.accepted > 0
    after = state if was_on_its_way else state._replace(wrong='"too late" was the answer, and no worker had the email')
    return Change('the email is cancelled: "too late"', after, fault=Fault.CANCEL)


def _operators(state: State) -> Iterator[Change]:
    if state.row.status in (Status.FAILED, Status.HELD) and state.resent == 0 and not state.row.is_over:
        after = _closed(state, Status.PENDING, attempts=0)
        after = after._replace(resent=state.resent + (state.row.status is Status.HELD))
        yield Change("an operator replays the email", after, Transition.REPLAY, fault=Fault.OPERATOR)


# The steps of the worker.


def _worker(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker = state.workers[i]
    step = worker.step
    if step is not Step.DEAD:
        yield from _takes(state, i, rules)
        yield from _goes_wrong(state, i, rules)
    if worker.late is not Late.NONE:
        yield from _late_statement(state, i, rules)
    if step is Step.TAKEN:
        yield from _leases(state, i, rules)
    elif step is Step.UNANSWERED:
        yield from _gives_back_unanswered(state, i)
    elif step is Step.LEASED:
        yield from _works(state, i, rules)


def _works(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """The steps of a worker with a leased email. Each step is an event of the product's table."""
    worker = state.workers[i]
    if worker.email in _RENEWED:
        yield from _renews(state, i, rules)
    match worker.email:
        case EmailState.PREPARING:
            yield from _ends_early(state, i, rules)
            yield from _waits(state, i, rules)
            yield from _leaves(state, i, rules)
        case EmailState.WAITING:
            yield from _ends_early(state, i, rules)
            yield from _retries(state, i, rules)
        case EmailState.MARKED:
            yield from _leaves(state, i, rules)
        case EmailState.ON_THE_WIRE if worker.outcome is Answer.NONE:
            yield from _sends(state, i)
            after = _on(state, i, EmailEvent.UNMARK, rules=rules, slot=Answer.NONE)
            text = f"worker {i}: the provider took nothing: it may be sent again"
            yield Change(text, after, fault=Fault.REFUSAL)
        case EmailState.ON_THE_WIRE:
            slot = worker.outcome if rules.ledger else Answer.NONE
            after = _on(state, i, EmailEvent.ANSWER, rules=rules, slot=slot)
            yield Change(f"worker {i}: its ledger says answered ({_said(worker.outcome)})", after)
        case EmailState.ANSWERED | EmailState.IN_DOUBT | EmailState.REFUSED:
            yield from _records(state, i, rules)
        case EmailState.RECORDED:
            yield from _done(state, i, rules)
        case EmailState.RELEASING:
            yield from _returns(state, i, rules)


_RENEWED: Final = frozenset(EmailState) - {
    EmailState.REFUSED,
    EmailState.RECORDED,
    EmailState.RELEASING,
    EmailState.DONE,
}
"""The states in which the lease is renewed."""


def _on(state: State, i: int, *events: EmailEvent, rules: Rules, **fields: Any) -> State:
    """Applies events to the leased email, as the table of states defines. Several events are one step if nothing
    depends on what happens in between: while an email waits or is being stopped, the worker only keeps the lease."""
    email: EmailState | None = state.workers[i].email
    for event in events:
        email = rules.table.get((email, event)) if email is not None else None
    if email is None:
        return _worker_is(state, i, not_allowed=True)
    return _worker_is(state, i, email=email, **fields)


def _ends_early(state: State, i: int, rules: Rules, *before: EmailEvent) -> Iterator[Change]:
    """The worker stops the email, the email cannot be sent now, or the adapter finds that the email can never be
    sent. A waiting email can only be stopped."""
    stopped = (*before, EmailEvent.STOP)
    after = _on(state, i, *stopped, EmailEvent.RELEASE, rules=rules)
    yield Change(f"worker {i}: stops it, and releases it", after)
    after = _on(state, i, *stopped, EmailEvent.ANSWER, rules=rules, outcome=Answer.REJECTED)
    yield Change(f"worker {i}: stops it, and its adapter refuses it", after, fault=Fault.REFUSAL)
    if not before and state.workers[i].email is not EmailState.WAITING:
        yield Change(f"worker {i}: releases it", _on(state, i, EmailEvent.RELEASE, rules=rules))
        after = _on(state, i, EmailEvent.ANSWER, rules=rules, outcome=Answer.REJECTED)
        yield Change(f"worker {i}: finds that it cannot be sent", after, fault=Fault.REFUSAL)


def _waits(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """The email waits for memory, or for the answers to other emails."""
    yield Change(f"worker {i}: lets it wait", _on(state, i, EmailEvent.WAIT, EmailEvent.RESUME, rules=rules))
    yield from _ends_early(state, i, rules, EmailEvent.WAIT)


def _takes(state: State, i: int, rules: Rules) -> Iterator[Change]:
    if not state.messages:
        return
    row, worker = state.row, state.workers[i]
    fewer = state._replace(messages=state.messages - 1)
    if worker.step is Step.IDLE:
        after = _worker_is(fewer, i, step=Step.TAKEN, has_message=rules.ack_after_commit)
        yield Change(f"worker {i}: takes its message", after)
    elif row.status is not Status.PENDING and worker.step is not Step.TAKEN:
        yield Change(f"worker {i}: acks a message of an email that it has leased", fewer)


def _leases(state: State, i: int, rules: Rules) -> Iterator[Change]:
    row = state.row
    if _may_be_leased(row, rules):
        after = _leased(state, i)
        leased = {"step": Step.LEASED, "email": EmailState.PREPARING, "attempt": after.row.attempts}
        leased |= {"pinned": row.pinned, "by_key": False}
        has = _worker_is(after, i, **leased, confirmed=True, attempted=Answer.NONE)
        yield Change(f"worker {i}: leases it", has, Transition.LEASE)
        lost = _worker_is(after, i, step=Step.UNANSWERED, owns=False)
        yield Change(f"worker {i}: leases it, and the reply is lost", lost, Transition.LEASE, fault=Fault.REPLY)
        late = _worker_is(state, i, step=Step.UNANSWERED, late=Late.LEASE)
        text = f"worker {i}: leases it, the connection is lost, PostgreSQL has not executed it yet"
        yield Change(text, late, fault=Fault.LATE)
    elif (row.status is Status.SENDING and row.owner == i) or _is_recovered(state, i):
        found = _worker_is(state, i, step=Step.UNANSWERED)
        yield Change(f"worker {i}: finds a lease in its name that it does not know", found)
    else:
        done = _worker_is(state, i, step=Step.IDLE, has_message=False)
        yield Change(f"worker {i}: acks the message of an email that is {row.status}", done)


def _may_be_leased(row: Row, rules: Rules) -> bool:
    is_stopped = (row.proven and rules.proof_stops_leases) or row.is_over
    return row.status is Status.PENDING and not is_stopped


def _leased(state: State, i: int) -> State:
    row = state.row
    leased = {"status": Status.SENDING, "attempts": row.attempts + 1, "owner": i, "due": False, "in_doubt": False}
    after = _row_is(state, expired=False, **leased)._replace(sent_after_event=state.sent_after_event or row.proven)
    if row.is_over:
        after = after._replace(wrong="a worker leased the email after its expiry")
    if row.status is Status.WAITING:
        after = after._replace(wrong="a worker leased the email before its time")
    return _token_moves(after, owner=i)


def _gives_back_unanswered(state: State, i: int) -> Iterator[Change]:
    row = state.row
    again = _worker_is(state, i, step=Step.TAKEN)
    if _is_recovered(state, i):
        after = _worker_is(_released(state), i, step=Step.TAKEN)
        yield Change(f"worker {i}: undoes the recovery of the lease in its name", after, Transition.RECOVER)
        return
    if row.status is not Status.SENDING or row.owner != i:
        yield Change(f"worker {i}: finds no lease in its name", again)
        return
    after = _worker_is(_released(state), i, step=Step.TAKEN)
    yield Change(f"worker {i}: releases the lease in its name", after, Transition.RELEASE)
    if state.workers[i].late is Late.NONE:
        late = _worker_is(state, i, late=Late.RELEASE)
        text = f"worker {i}: releases it, the connection is lost, PostgreSQL has not executed it yet"
        yield Change(text, late, fault=Fault.LATE)


def _late_statement(state: State, i: int, rules: Rules) -> Iterator[Change]:
    row, late = state.row, state.workers[i].late
    done = _worker_is(state, i, late=Late.NONE)
    if late is Late.LEASE and _may_be_leased(row, rules):
        after = _worker_is(_leased(done, i), i, owns=False)
        yield Change(f"PostgreSQL executes worker {i}'s lease late", after, Transition.LEASE, fault=Fault.LATE)
    elif late is Late.RELEASE and row.status is Status.SENDING and row.owner == i:
        after = _released(done)
        yield Change(f"PostgreSQL executes worker {i}'s release late", after, Transition.RELEASE, fault=Fault.LATE)
    else:
        yield Change(f"PostgreSQL executes worker {i}'s statement late, which changes nothing", done)


def _leaves(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """The worker's steps from the lease to the first byte: mark the ledger slot, check the lease, send."""
    worker = state.workers[i]
    if worker.email is EmailState.PREPARING:
        slot = Answer.ON_THE_WIRE if rules.ledger else Answer.NONE
        for by_key in _providers(worker, rules):
            after = _on(state, i, EmailEvent.MARK, rules=rules, slot=slot, by_key=by_key)._replace(may_be_held=True)
            name = " at the provider with keys" if by_key else ""
            yield Change(f"worker {i}: its ledger says on the wire{name}", after)
    elif worker.confirmed and not (state.row.is_over and rules.expiry_stops_sends):
        after = _begun(_on(state, i, EmailEvent.SEND, rules=rules))
        yield Change(f"worker {i}: its lease is not void", after)
    else:
        after = _on(state, i, EmailEvent.UNMARK, rules=rules, slot=Answer.NONE)
        yield Change(f"worker {i}: its lease is void, or the email has expired: clears its slot", after)


def _begun(state: State) -> State:
    if state.cancelled:
        return state._replace(wrong="the email was cancelled, and an attempt began afterwards")
    if state.row.is_over:
        return state._replace(wrong="an attempt began after the email's expiry")
    return state


def _providers(worker: Worker, rules: Rules) -> tuple[bool, ...]:
    """The providers that may be tried: for each, whether it has idempotency keys."""
    if not rules.keys:
        return (False,)
    return (True,) if worker.pinned and rules.pins else (True, False)


def _sends(state: State, i: int) -> Iterator[Change]:
    by_key = state.workers[i].by_key
    accepted = state._replace(accepted=state.accepted + 1, keyed=state.keyed or by_key)
    if by_key and state.keyed:
        accepted = state  # the provider repeats its first answer
    for outcome, before, text in (
        (Answer.ACCEPTED, accepted, "accepts it"),
        (Answer.UNCERTAIN, accepted, "accepts it and closes without an answer"),
        (Answer.DEFERRED, state, "defers it"),
        (Answer.REJECTED, state, "rejects it"),
        (Answer.UNCERTAIN, state, "takes nothing and closes without an answer"),
    ):
        after = _worker_is(before, i, outcome=outcome)
        yield Change(f"worker {i}: sends it; the provider {text}", after)


def _records(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker = state.workers[i]
    refused = _on(state, i, EmailEvent.REFUSE, rules=rules)
    yield Change(f"worker {i}: PostgreSQL refuses its result", refused, fault=Fault.REFUSAL)
    unsaid = _on(state, i, EmailEvent.LOSE_REPLY, rules=rules)
    yield Change(f"worker {i}: loses its connection before PostgreSQL records it", unsaid, fault=Fault.REPLY)
    if worker.email is EmailState.IN_DOUBT:
        if worker.attempted is Answer.NONE:
            # The state is the same as if the worker had never tried to record.
            again = _worker_is(state, i, email=EmailState.ANSWERED)
            yield Change(f"worker {i}: finds no record of its attempt", again)
        else:
            kept = Answer.NONE if _is_retried(worker) else worker.outcome
            after = _on(state, i, EmailEvent.RECORD, rules=rules, outcome=kept)
            yield Change(f"worker {i}: finds its attempt recorded", after)
        return
    lease: dict[str, Any] = {"owns": worker.owns, "owner": i, "owner_recovered": worker.recovered}
    lease |= {"pinned": worker.pinned, "by_key": worker.by_key}
    after, transition = _recorded(state, worker.outcome, worker.attempt, rules, **lease)
    after = _worker_is(after, i, attempted=worker.outcome)
    is_lost = _is_retried(worker) and transition in (None, Transition.RECOVER)
    outcome = Answer.NONE if is_lost else worker.outcome
    text = f"worker {i}: records it ({_said(worker.outcome)})"
    yield Change(text, _on(after, i, EmailEvent.RECORD, rules=rules, outcome=outcome), transition)
    lost = _on(after, i, EmailEvent.LOSE_REPLY, rules=rules)
    yield Change(f"{text}, and the reply is lost", lost, transition, fault=Fault.REPLY)


def _is_retried(worker: Worker) -> bool:
    """Whether the worker's result is a deferral."""
    is_in_doubt = worker.outcome is Answer.UNCERTAIN and (worker.by_key or worker.pinned)
    return worker.outcome is Answer.DEFERRED or (is_in_doubt and worker.attempt < MAX_ATTEMPTS)


def _done(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """The steps of a worker that has recorded an answer: it clears the ledger's slot and acks the message. Then it
    retries a deferred email under the same lease. If the lease was lost, the worker releases the email instead."""
    worker = state.workers[i]
    cleared = _worker_is(state, i, outcome=Answer.NONE, has_message=False, slot=Answer.NONE)
    text = f"worker {i}: clears its slot, acks"
    if worker.outcome is Answer.NONE:
        after = _on(cleared, i, EmailEvent.RELEASE, rules=rules)
        yield Change(f"{text}, and will not retry: its lease was lost", after)
    elif _is_retried(worker) and worker.attempt < MAX_ATTEMPTS:
        again = _worker_is(cleared, i, attempt=worker.attempt + 1, attempted=Answer.NONE)
        yield Change(f"{text}; then waits for its next attempt", _on(again, i, EmailEvent.WAIT, rules=rules))
        text = f"{text}; then releases the email, because enough emails wait"
        yield Change(text, _on(again, i, EmailEvent.RELEASE, rules=rules))
    else:
        yield Change(text, _finished(state, i, rules))


def _finished(state: State, i: int, rules: Rules) -> State:
    after = _on(state, i, EmailEvent.FINISH, rules=rules)
    worker = after.workers[i]
    return after if worker.not_allowed else _worker_is(after, i, **Worker(late=worker.late)._asdict())


def _returns(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker, row = state.workers[i], state.row
    if row.status is Status.SENDING and (worker.owns or not rules.tokens):
        after = _released(state)
        text = f"worker {i}: releases its lease"
        yield Change(text, _finished(after, i, rules), Transition.RELEASE)
        yield Change(f"{text}, and the reply is lost", after, Transition.RELEASE, fault=Fault.REPLY)
        if Fault.CEILING in rules.faults:
            aside = _row_is(_released(state), status=Status.WAITING, due=False)
            text = f"worker {i}: releases it to wait for a recipient domain"
            yield Change(text, _finished(aside, i, rules), Transition.WAIT_FOR_DOMAINS, fault=Fault.CEILING)
    elif row.status is Status.HELD and worker.recovered:
        after = _released(state)
        text = f"worker {i}: had not begun it: undoes its recovery"
        yield Change(text, _finished(after, i, rules), Transition.RECOVER)
        yield Change(f"{text}, and the reply is lost", after, Transition.RECOVER, fault=Fault.REPLY)
    else:
        yield Change(f"worker {i}: has finished with it", _finished(state, i, rules))


def _retries(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """The wait for the next attempt is over: the worker renews its lease, and begins the attempt if it may."""
    row = state.row
    if row.status is not Status.SENDING or not state.workers[i].owns or row.proven:
        return  # the worker stops the email, as it may at any time
    after = _lease_prolonged(state)._replace(sent_after_event=state.sent_after_event or row.proven)
    after = _on(after, i, EmailEvent.RESUME, rules=rules, confirmed=True)
    yield Change(f"worker {i}: renews its lease, retries", after)


def _renews(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker, row = state.workers[i], state.row
    if row.status is Status.SENDING and worker.owns:
        after = _lease_prolonged(state)
        if not row.proven:
            yield Change(f"worker {i}: renews its lease", _worker_is(after, i, confirmed=True))
        yield Change(f"worker {i}: renews its lease, and the reply is lost", after, fault=Fault.REPLY)


def _goes_wrong(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker = state.workers[i]
    if worker.step is Step.IDLE and worker.late is Late.NONE and i not in (state.row.owner, state.row.recovered_from):
        return
    messages = state.messages + worker.has_message
    back = state._replace(messages=messages)
    if Fault.DEATH in rules.faults:
        yield Change(f"worker {i} dies", _worker_is(back, i, step=Step.DEAD, has_message=False), fault=Fault.DEATH)
    if Fault.HOST in rules.faults:
        gone = _settlement_is(_worker_is(back, i, **_NEW_WORKER), i, LiveSettlement())
        if state.row.owner == i:
            gone = _row_is(gone, owner=GONE)
        if state.row.recovered_from == i:
            gone = _row_is(gone, recovered_from=GONE)
        yield Change(f"worker {i}'s host dies, its ledger is lost", gone, fault=Fault.HOST)
    if worker.has_message and Fault.CHANNEL in rules.faults:
        after = _worker_is(back, i, has_message=False)
        yield Change(f"worker {i} loses its channel: its message is redelivered", after, fault=Fault.CHANNEL)
