"""Every step that the protocol, the servers, time and an adversary can take from a state.

Each step is one commit, one write to the ledger, or one word on a wire; between any two of them anything else may
happen, so that a process which is stopped, frozen or slow is every order that leaves it out for a while. Where a step
changes the email's status, it says which transition of `dispatcher/domain/status.py` that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from dispatcher.domain.status import OnUncertain, Status, Transition
from dispatcher.worker.in_flight_email import TRANSITIONS, Event
from dispatcher.worker.in_flight_email import State as InFlight
from tests.model.state import (
    GONE,
    MAX_ATTEMPTS,
    MOST_MESSAGES,
    NOBODY,
    WORKERS,
    Answer,
    DeadLetter,
    Late,
    Look,
    Row,
    Stage,
    State,
    Step,
    Worker,
)


class Fault(Enum):
    """What can go wrong, as often as it likes."""

    DEATH = "a worker's process dies"
    HOST = "a worker's host dies, and its ledger with it"
    RELAY = "a relay dies between two steps, or is too slow for the rescue's grace"
    CHANNEL = "a channel is lost, and its messages come again"
    COPY = "a message is there twice"
    PURGE = "RabbitMQ loses its messages"
    REPLY = "PostgreSQL commits, and the reply is lost"
    LATE = "the connection is lost, and PostgreSQL executes the statement later"
    REFUSAL = "we refuse an email ourselves, a provider takes nothing of it, or PostgreSQL refuses its result"
    PERSON = "a person replays what failed or is held"
    PROMOTION = "a standby is promoted that lacks every commit since the enqueue; by itself alone, it is survived"


@dataclass(frozen=True, slots=True)
class Rules:
    """The protocol's rules; each that is switched off makes a mutant.

    Attributes:
        policy: What to do where nobody can know whether the provider accepted.
        faults: What may go wrong.
        ledger: A worker writes its in-flight ledger.
        tokens: Writes of a lease that was lost change nothing, an acceptance excepted.
        ack_after_commit: A message is acked once its work is committed; else on delivery.
        slot_before_check: The slot is written before the lease is checked; else after.
        fenced_settlement: The relay settles a lease only as it saw it; else any lease with that token that has expired.
        fenced_return: What a lost reply may have leased is given back by its token, and due again; else by the worker's
            name, and not.
        voids: The relay voids a living worker's leases before it reads the ledger.
        own_name: The relay records a living worker's attempts in its own name; else in the worker's.
        confirms_rescues: An uncertain attempt that is recorded after a rescue has the rescue stand for good.
        fenced_recovery: A rescue is undone only as long as nobody has touched the email; else whenever it is held.
        table: The product's table of how an email moves through a worker; a mutant lacks a row.
    """

    policy: OnUncertain = OnUncertain.HOLD
    faults: frozenset[Fault] = frozenset(Fault) - {Fault.PROMOTION}
    ledger: bool = True
    tokens: bool = True
    ack_after_commit: bool = True
    slot_before_check: bool = True
    fenced_settlement: bool = True
    fenced_return: bool = True
    voids: bool = True
    own_name: bool = True
    confirms_rescues: bool = True
    fenced_recovery: bool = True
    table: Mapping[tuple[InFlight, Event], InFlight] = field(default_factory=lambda: TRANSITIONS)

    def with_faults(self, faults: frozenset[Fault]) -> Rules:
        """The same rules where this may go wrong."""
        return replace(self, faults=faults)


class Change(NamedTuple):
    """One step.

    Attributes:
        text: What happens, for a person.
        after: The state then.
        transition: Which change of the status it is; None if it is none.
        fault: What goes wrong; None if nothing does.
    """

    text: str
    after: State
    transition: Transition | None = None
    fault: Fault | None = None


def changes(state: State, rules: Rules) -> Iterator[Change]:
    """Every step from here."""
    for change in _all_changes(state, rules):
        if change.fault is None or change.fault in rules.faults:
            yield change


def _all_changes(state: State, rules: Rules) -> Iterator[Change]:
    yield from _relay(state, rules)
    yield from _servers(state)
    yield from _persons(state)
    yield from _promotion(state)
    for i in WORKERS:
        yield from _worker(state, i, rules)
        yield from _settlement(state, i, rules)


# What every write to the row has in common.


def _worker_is(state: State, i: int, **fields: Any) -> State:
    workers = list(state.workers)
    workers[i] = workers[i]._replace(**fields)
    return state._replace(workers=tuple(workers))


def _row_is(state: State, **fields: Any) -> State:
    row = state.row._replace(**fields)
    # What becomes due after the look of the publisher stays due; what is not due any more needs no mark.
    marking = state.marking and "due" not in fields
    return state._replace(row=row, marking=marking)


def _token_moves(state: State, rules: Rules, owner: int | None = None) -> State:
    """The row has a new token: it is `owner`'s, and every other is old."""
    workers = tuple(
        w._replace(
            owns=i == owner,
            late=Late.NONE if w.late is Late.RELEASE and rules.fenced_return else w.late,
        )
        for i, w in enumerate(state.workers)
    )
    return state._replace(workers=workers, looks=tuple(look._replace(fits=False) for look in state.looks))


def _lease_prolonged(state: State, rules: Rules) -> State:
    state = _row_is(state, expired=False)
    if rules.fenced_settlement:
        state = state._replace(looks=tuple(look._replace(fits=False) for look in state.looks))
    return state


def _closed(state: State, status: Status, **fields: Any) -> State:
    """The lease ends, or what stands in its place."""
    dead_letter = DeadLetter.DUE if status in (Status.FAILED, Status.HELD) else DeadLetter.NONE
    fields = {"due": status is Status.PENDING, "unsure": False, **fields}
    state = _row_is(state, status=status, owner=NOBODY, expired=False, dead_letter=dead_letter, **fields)
    return _rescue_stands(state)


def _rescue_stands(state: State) -> State:
    """Whatever was rescued before, nobody's word undoes it any more."""
    workers = tuple(worker._replace(rescued=False) for worker in state.workers)
    return _row_is(state, rescued=NOBODY)._replace(workers=workers, marking=state.marking)


def _released(state: State, **fields: Any) -> State:
    """The lease is given back, its attempt not burnt."""
    return _closed(state, Status.PENDING, attempts=max(0, state.row.attempts - 1), **fields)


def _decided(state: State, answer: Answer, attempt: int, rules: Rules) -> tuple[Status, Transition]:
    """What an outcome leads to where no owner is left to retry (`domain/decision.py`, `store/results.py`)."""
    has_attempts_left = attempt < MAX_ATTEMPTS
    match answer:
        case Answer.ACCEPTED:
            late = state.row.status is not Status.SENDING
            return Status.SENT, Transition.EVIDENCE if late else Transition.ACCEPT
        case Answer.DEFERRED if has_attempts_left:
            return Status.PENDING, Transition.RELEASE
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
    owner_rescued: bool = False,
) -> tuple[State, Transition | None]:
    """The `record` statement; `owner` retries a deferral under its lease."""
    row = state.row
    if owner_rescued and row.status is Status.HELD and answer is not Answer.ACCEPTED:
        return _recorded_after_rescue(state, answer, attempt, rules)
    status, transition = _decided(state, answer, attempt, rules)
    is_ours = row.status is Status.SENDING and (owns or not rules.tokens)
    if answer is Answer.ACCEPTED and not owns:
        transition = Transition.EVIDENCE
    if not is_ours and not (status is Status.SENT and row.status is not Status.SENT):
        return state, None
    if transition is Transition.RELEASE and owner is not None:
        state = _lease_prolonged(_row_is(state, attempts=min(row.attempts + 1, MAX_ATTEMPTS)), rules)
        return _worker_is(state, owner, confirmed=True), Transition.DEFER
    if transition is Transition.RESEND:
        state = state._replace(resent=state.resent + 1)
    return _closed(state, status), transition


def _recorded_after_rescue(state: State, answer: Answer, attempt: int, rules: Rules) -> tuple[State, Transition | None]:
    """The `record` statement of a lease that a rescue took away, and nobody has touched the email since."""
    if answer is Answer.UNCERTAIN:
        return (_rescue_stands(state) if rules.confirms_rescues else state), None
    status, _ = _decided(state, answer, attempt, rules)
    return _closed(state, status), Transition.RECOVER if status is Status.PENDING else Transition.FAIL


def _recovered(state: State) -> State:
    """The `recover_rescued` statement."""
    return _released(state)


# The relay: publishes what is due, publishes dead letters, rescues, looks for what vanished.


def _relay(state: State, rules: Rules) -> Iterator[Change]:
    row = state.row
    if row.due and not state.marking and _messages(state) < MOST_MESSAGES:
        yield Change("relay: publishes its message", state._replace(messages=state.messages + 1, marking=True))
    if state.marking:
        yield Change("relay: clears its due mark", _row_is(state, due=False))
        yield Change("relay dies before it clears the due mark", state._replace(marking=False), fault=Fault.RELAY)
    if row.dead_letter is DeadLetter.DUE:
        yield Change("relay: publishes its dead letter", _row_is(state, dead_letter=DeadLetter.PUBLISHED))
    if row.unsure:
        yield from _judges_unsure(state, rules)
    elif row.status is Status.PENDING and not row.due and state.messages == 0:
        yield Change(
            "relay: its message has vanished, due again",
            _row_is(state, due=True),
            fault=None if state.purged else Fault.PURGE,
        )
    if row.status is Status.SENDING and row.expired:
        after, transition = _rescued(state, rules)
        yield Change(
            "relay: rescues it without a ledger", after, transition, fault=None if row.owner == GONE else Fault.RELAY
        )


def _judges_unsure(state: State, rules: Rules) -> Iterator[Change]:
    """RabbitMQ has no message, and workers have had a lease's length to record what they hold."""
    if state.messages or any(worker.step is not Step.IDLE for worker in state.workers):
        return
    if rules.policy is OnUncertain.RESEND:
        after = _row_is(state, due=True, unsure=False)._replace(resent=state.resent + 1)
        yield Change("relay: may have been sent in lost commits, due again", after)
    else:
        yield Change("relay: may have been sent in lost commits", _closed(state, Status.HELD), Transition.HOLD)


def _rescued(state: State, rules: Rules) -> tuple[State, Transition | None]:
    after, transition = _recorded(state, Answer.UNCERTAIN, state.row.attempts, rules, owns=True)
    if transition is Transition.HOLD:
        workers = tuple(worker._replace(rescued=worker.owns) for worker in after.workers)
        after = _row_is(after, rescued=state.row.owner)._replace(workers=workers)
    return _token_moves(after, rules)._replace(may_be_held=True), transition


# Each host's relay: settles its worker's ledger, living or dead.


def _settlement(state: State, i: int, rules: Rules) -> Iterator[Change]:
    row, look, worker = state.row, state.looks[i], state.workers[i]
    if look.stage is not Stage.NONE:
        yield _settles_living(state, i, rules)
        yield Change(f"relay of worker {i} dies between two steps", _looks(state, i, Look()), fault=Fault.RELAY)
    elif worker.step is Step.DEAD:
        yield _settles_dead(state, i, rules)
    elif row.status is Status.SENDING and row.expired and row.owner == i:
        after = _looks(state, i, Look(Stage.FOUND, fits=True))
        yield Change(f"relay: finds that worker {i}'s lease has run out", after)


def _looks(state: State, i: int, look: Look) -> State:
    looks = list(state.looks)
    looks[i] = look
    return state._replace(looks=tuple(looks))


def _settles_living(state: State, i: int, rules: Rules) -> Change:
    """Found, voided, read, settled."""
    look, worker = state.looks[i], state.workers[i]
    match look.stage:
        case Stage.FOUND:
            after = _looks(state, i, look._replace(stage=Stage.VOIDED))
            after = _worker_is(after, i, confirmed=worker.confirmed and not rules.voids)
            return Change(f"relay: voids what was confirmed to worker {i} before", after)
        case Stage.VOIDED:
            slot = worker.slot if worker.owns else Answer.NONE
            after = _looks(state, i, look._replace(stage=Stage.READ, slot=slot, attempt=worker.attempt))
            return Change(f"relay: reads worker {i}'s ledger: {_said(slot)}", after)
        case _:
            after, transition = _settled_living(_looks(state, i, Look()), i, look, rules)
            return Change(f"relay: settles worker {i}'s lease: {_said(look.slot)}", after, transition)


def _settled_living(state: State, i: int, look: Look, rules: Rules) -> tuple[State, Transition | None]:
    is_expired = state.row.status is Status.SENDING and state.row.expired
    if not (is_expired and (look.fits or not rules.tokens)):
        return state, None
    if look.slot is Answer.NONE:
        return _token_moves(_released(state), rules), Transition.RELEASE
    answer = Answer.UNCERTAIN if look.slot is Answer.ON_THE_WIRE else look.slot
    after, transition = _recorded(state, answer, look.attempt, rules, owns=True)
    return (after if rules.own_name else _worker_is(after, i, attempted=answer)), transition


def _settles_dead(state: State, i: int, rules: Rules) -> Change:
    """First the sessions end, then the ledger is recorded, then the rest is given back."""
    worker = state.workers[i]
    if worker.slot is not Answer.NONE and worker.attempted is Answer.NONE:
        answer = Answer.UNCERTAIN if worker.slot is Answer.ON_THE_WIRE else worker.slot
        after, transition = _recorded(
            state, answer, worker.attempt, rules, owns=worker.owns, owner_rescued=worker.rescued
        )
        text = f"relay: records what dead worker {i}'s ledger says: {_said(worker.slot)}"
        return Change(text, _worker_is(after, i, attempted=answer, late=Late.NONE), transition)
    fresh = _worker_is(state, i, **Worker()._asdict())
    if state.row.status is Status.SENDING and state.row.owner == i:
        after = _token_moves(_released(fresh), rules)
        return Change(f"relay: gives back what dead worker {i} had leased", after, Transition.RELEASE)
    if _is_rescued(state, i, rules):
        after = _recovered(fresh)
        return Change(f"relay: undoes the rescue of what dead worker {i} had leased", after, Transition.RECOVER)
    return Change(f"relay: dead worker {i}'s ledger is settled", fresh)


def _is_rescued(state: State, i: int, rules: Rules) -> bool:
    """Whether the worker's name stands in the row as that from which a rescue took it."""
    row = state.row
    return row.status is Status.HELD and (row.rescued == i or not rules.fenced_recovery)


def _said(slot: Answer) -> str:
    return "not named" if slot is Answer.NONE else slot.name.lower().replace("_", " ")


# Time, RabbitMQ, and everybody who may replay.


def _messages(state: State) -> int:
    return state.messages + sum(worker.has_message for worker in state.workers)


def _servers(state: State) -> Iterator[Change]:
    row = state.row
    if row.status is Status.SENDING and not row.expired:
        yield Change("the lease runs out", _row_is(state, expired=True))
    if state.messages and _messages(state) < MOST_MESSAGES:
        after = state._replace(messages=state.messages + 1)
        yield Change("RabbitMQ has its message a second time", after, fault=Fault.COPY)
    if (state.messages or any(w.has_message for w in state.workers)) and not state.purged:
        workers = tuple(w._replace(has_message=False) for w in state.workers)
        after = state._replace(messages=0, purged=True, workers=workers)
        yield Change("RabbitMQ loses its messages", after, fault=Fault.PURGE)


def _promotion(state: State) -> Iterator[Change]:
    """The email is as it was enqueued, and the relay has found so. Its worker's lease is gone with its token."""
    if state.promoted:
        return
    workers = tuple(w._replace(owns=False, rescued=False, attempted=Answer.NONE) for w in state.workers)
    after = state._replace(row=Row(due=False, unsure=True), marking=False, workers=workers, looks=(Look(), Look()))
    text = "PostgreSQL: a standby without the commits since the enqueue is promoted"
    yield Change(text, after._replace(promoted=True, may_be_held=True), fault=Fault.PROMOTION)


def _persons(state: State) -> Iterator[Change]:
    if state.row.status in (Status.FAILED, Status.HELD) and state.resent == 0:
        after = _closed(state, Status.PENDING, attempts=0)
        after = after._replace(resent=state.resent + (state.row.status is Status.HELD))
        yield Change("a person: replays it", after, Transition.REPLAY, fault=Fault.PERSON)


# The worker.


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
        yield from _gives_back_unanswered(state, i, rules)
    elif step is Step.IN_HAND:
        yield from _works(state, i, rules)


def _works(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """What a worker does with an email in hand, and what happens to it: each an event of the product's table."""
    worker = state.workers[i]
    if worker.email in _RENEWED:
        yield from _renews(state, i, rules)
    match worker.email:
        case InFlight.PREPARING:
            yield from _ends_early(state, i, rules)
            yield from _waits(state, i, rules)
            yield from _leaves(state, i, rules)
        case InFlight.NAMED:
            yield from _leaves(state, i, rules)
        case InFlight.ON_THE_WIRE if worker.outcome is Answer.NONE:
            yield from _sends(state, i)
            after = _on(state, i, Event.COME_BACK, rules=rules, slot=Answer.NONE)
            text = f"worker {i}: the provider took nothing: it may leave again"
            yield Change(text, after, fault=Fault.REFUSAL)
        case InFlight.ON_THE_WIRE:
            slot = worker.outcome if rules.ledger else Answer.NONE
            after = _on(state, i, Event.ANSWER, rules=rules, slot=slot)
            yield Change(f"worker {i}: its ledger says what came ({_said(worker.outcome)})", after)
        case InFlight.ANSWERED | InFlight.IN_DOUBT | InFlight.REFUSED:
            yield from _records(state, i, rules)
        case InFlight.RECORDED:
            yield from _done(state, i, rules)
        case InFlight.RETURNING:
            yield from _returns(state, i, rules)


_RENEWED: Final = frozenset(InFlight) - {InFlight.REFUSED, InFlight.RECORDED, InFlight.RETURNING, InFlight.DONE}
"""While the email is in one of these states its lease is renewed."""


def _on(state: State, i: int, *events: Event, rules: Rules, **fields: Any) -> State:
    """What happens to the email in hand moves it as the table says.

    Several events are one step where nothing depends on what happens in between: whoever waits, or is stopped, does
    nothing meanwhile but keep its lease.
    """
    email: InFlight | None = state.workers[i].email
    for event in events:
        email = rules.table.get((email, event)) if email is not None else None
    if email is None:
        return _worker_is(state, i, not_allowed=True)
    return _worker_is(state, i, email=email, **fields)


def _ends_early(state: State, i: int, rules: Rules, *before: Event) -> Iterator[Change]:
    """It is stopped, cannot be sent now, or we find by ourselves that it can never be sent."""
    stopped = (*before, Event.STOP)
    after = _on(state, i, *stopped, Event.RETURN, rules=rules)
    yield Change(f"worker {i}: is told to stop it, and gives it back", after)
    after = _on(state, i, *stopped, Event.ANSWER, rules=rules, outcome=Answer.REJECTED)
    yield Change(f"worker {i}: is told to stop it, and its adapter refuses it", after, fault=Fault.REFUSAL)
    if not before:
        yield Change(f"worker {i}: gives it back", _on(state, i, Event.RETURN, rules=rules))
        after = _on(state, i, Event.ANSWER, rules=rules, outcome=Answer.REJECTED)
        yield Change(f"worker {i}: finds that it cannot be sent", after, fault=Fault.REFUSAL)


def _waits(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """For memory, for the answers to other emails, or for its next attempt."""
    yield Change(f"worker {i}: lets it wait", _on(state, i, Event.WAIT, Event.RESUME, rules=rules))
    yield from _ends_early(state, i, rules, Event.WAIT)


def _takes(state: State, i: int, rules: Rules) -> Iterator[Change]:
    if not state.messages:
        return
    row, worker = state.row, state.workers[i]
    fewer = state._replace(messages=state.messages - 1)
    if worker.step is Step.IDLE:
        after = _worker_is(fewer, i, step=Step.TAKEN, has_message=rules.ack_after_commit)
        yield Change(f"worker {i}: takes its message", after)
    elif row.status is not Status.PENDING and worker.step is not Step.TAKEN:
        yield Change(f"worker {i}: acks a message of an email that it has in hand", fewer)


def _leases(state: State, i: int, rules: Rules) -> Iterator[Change]:
    row = state.row
    if row.status is Status.PENDING:
        after = _leased(state, i, rules)
        leased = {"step": Step.IN_HAND, "email": InFlight.PREPARING, "attempt": after.row.attempts}
        has = _worker_is(after, i, **leased, confirmed=True, attempted=Answer.NONE)
        yield Change(f"worker {i}: leases it", has, Transition.LEASE)
        lost = _worker_is(after, i, step=Step.UNANSWERED, owns=False)
        yield Change(f"worker {i}: leases it, and the reply is lost", lost, Transition.LEASE, fault=Fault.REPLY)
        late = _worker_is(state, i, step=Step.UNANSWERED, late=Late.LEASE)
        yield Change(f"worker {i}: leases it, the connection is lost, PostgreSQL is not done", late, fault=Fault.LATE)
    elif (row.status is Status.SENDING and row.owner == i) or _is_rescued(state, i, rules):
        yield Change(
            f"worker {i}: finds a lease in its name that it does not know", _worker_is(state, i, step=Step.UNANSWERED)
        )
    else:
        done = _worker_is(state, i, step=Step.IDLE, has_message=False)
        yield Change(f"worker {i}: acks the message of an email that is {row.status}", done)


def _leased(state: State, i: int, rules: Rules) -> State:
    row = state.row
    leased = {"status": Status.SENDING, "attempts": row.attempts + 1, "owner": i, "due": False, "unsure": False}
    after = _row_is(state, expired=False, **leased)
    return _token_moves(after, rules, owner=i)


def _gives_back_unanswered(state: State, i: int, rules: Rules) -> Iterator[Change]:
    row = state.row
    again = _worker_is(state, i, step=Step.TAKEN)
    if _is_rescued(state, i, rules):
        after = _worker_is(_recovered(state), i, step=Step.TAKEN)
        yield Change(f"worker {i}: undoes the rescue of the lease in its name", after, Transition.RECOVER)
        return
    if row.status is not Status.SENDING or row.owner != i:
        yield Change(f"worker {i}: finds no lease in its name", again)
        return
    due = {} if rules.fenced_return else {"due": False}
    after = _worker_is(_released(state, **due), i, step=Step.TAKEN)
    yield Change(f"worker {i}: gives back the lease in its name", after, Transition.RELEASE)
    if state.workers[i].late is Late.NONE:
        late = _worker_is(state, i, late=Late.RELEASE)
        yield Change(
            f"worker {i}: gives it back, the connection is lost, PostgreSQL is not done", late, fault=Fault.LATE
        )


def _late_statement(state: State, i: int, rules: Rules) -> Iterator[Change]:
    row, late = state.row, state.workers[i].late
    done = _worker_is(state, i, late=Late.NONE)
    if late is Late.LEASE and row.status is Status.PENDING:
        after = _worker_is(_leased(done, i, rules), i, owns=False)
        yield Change(f"PostgreSQL executes worker {i}'s lease late", after, Transition.LEASE, fault=Fault.LATE)
    elif late is Late.RELEASE and row.status is Status.SENDING and row.owner == i:
        due = {} if rules.fenced_return else {"due": False}
        after = _released(done, **due)
        yield Change(f"PostgreSQL executes worker {i}'s return late", after, Transition.RELEASE, fault=Fault.LATE)
    else:
        yield Change(f"PostgreSQL executes worker {i}'s statement late, which changes nothing", done)


def _leaves(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """From the lease to the first byte: name it in the ledger, check the lease, send."""
    worker = state.workers[i]
    is_first = worker.email is InFlight.PREPARING
    event = Event.NAME if is_first else Event.LEAVE
    if is_first is rules.slot_before_check:
        slot = Answer.ON_THE_WIRE if rules.ledger else Answer.NONE
        after = _on(state, i, event, rules=rules, slot=slot)._replace(may_be_held=True)
        yield Change(f"worker {i}: its ledger says on the wire", after)
    elif worker.confirmed:
        yield Change(f"worker {i}: its lease is not void", _on(state, i, event, rules=rules))
    elif not is_first:
        after = _on(state, i, Event.COME_BACK, rules=rules, slot=Answer.NONE)
        yield Change(f"worker {i}: its lease is void: clears its slot", after)


def _sends(state: State, i: int) -> Iterator[Change]:
    accepted = state._replace(accepted=state.accepted + 1)
    for outcome, before, text in (
        (Answer.ACCEPTED, accepted, "accepts it"),
        (Answer.UNCERTAIN, accepted, "accepts it and closes without an answer"),
        (Answer.DEFERRED, state, "defers it"),
        (Answer.REJECTED, state, "rejects it"),
        (Answer.UNCERTAIN, state, "closes without an answer, not having taken it"),
    ):
        after = _worker_is(before, i, outcome=outcome)
        yield Change(f"worker {i}: sends it; the provider {text}", after)


def _records(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker = state.workers[i]
    refused = _on(state, i, Event.REFUSE, rules=rules)
    yield Change(f"worker {i}: PostgreSQL refuses its result", refused, fault=Fault.REFUSAL)
    unsaid = _on(state, i, Event.LOSE_REPLY, rules=rules)
    yield Change(f"worker {i}: loses its connection before PostgreSQL records it", unsaid, fault=Fault.REPLY)
    if worker.email is InFlight.IN_DOUBT:
        if worker.attempted is Answer.NONE:
            # The same state as if it had never tried, for whatever happens next.
            again = _worker_is(state, i, email=InFlight.ANSWERED)
            yield Change(f"worker {i}: finds no record of its attempt", again)
        else:
            kept = Answer.NONE if worker.outcome is Answer.DEFERRED else worker.outcome
            after = _on(state, i, Event.RECORD, rules=rules, outcome=kept)
            yield Change(f"worker {i}: finds its attempt on record", after)
        return
    after, transition = _recorded(
        state, worker.outcome, worker.attempt, rules, owns=worker.owns, owner=i, owner_rescued=worker.rescued
    )
    after = _worker_is(after, i, attempted=worker.outcome)
    is_lost = worker.outcome is Answer.DEFERRED and transition in (None, Transition.RECOVER)
    outcome = Answer.NONE if is_lost else worker.outcome
    text = f"worker {i}: records it ({_said(worker.outcome)})"
    yield Change(text, _on(after, i, Event.RECORD, rules=rules, outcome=outcome), transition)
    lost = _on(after, i, Event.LOSE_REPLY, rules=rules)
    yield Change(f"{text}, and the reply is lost", lost, transition, fault=Fault.REPLY)


def _done(state: State, i: int, rules: Rules) -> Iterator[Change]:
    """The slot is cleared and the message acked; a deferral is retried under the lease, or given back."""
    worker = state.workers[i]
    cleared = _worker_is(state, i, outcome=Answer.NONE, has_message=False, slot=Answer.NONE)
    text = f"worker {i}: clears its slot, acks"
    if worker.outcome is Answer.NONE:
        after = _on(cleared, i, Event.RETURN, rules=rules)
        yield Change(f"{text}, and will not retry: its lease was lost", after)
    elif worker.outcome is Answer.DEFERRED and worker.attempt < MAX_ATTEMPTS:
        again = _worker_is(cleared, i, attempt=worker.attempt + 1, attempted=Answer.NONE)
        for change in _waits(again, i, rules):
            yield change._replace(text=f"{text}; then {change.text}")
    else:
        yield Change(text, _finished(state, i, rules))


def _finished(state: State, i: int, rules: Rules) -> State:
    after = _on(state, i, Event.FINISH, rules=rules)
    return after if after.workers[i].not_allowed else _worker_is(after, i, **_idle(after.workers[i]))


def _idle(worker: Worker) -> dict[str, Any]:
    return Worker(late=worker.late)._asdict()


def _returns(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker, row = state.workers[i], state.row
    if row.status is Status.SENDING and (worker.owns or not rules.tokens):
        after = _released(state)
        text = f"worker {i}: gives its lease back"
        yield Change(text, _finished(after, i, rules), Transition.RELEASE)
        yield Change(f"{text}, and the reply is lost", after, Transition.RELEASE, fault=Fault.REPLY)
    elif row.status is Status.HELD and (worker.rescued or not rules.fenced_recovery):
        after = _recovered(state)
        text = f"worker {i}: had not begun it: undoes its rescue"
        yield Change(text, _finished(after, i, rules), Transition.RECOVER)
        yield Change(f"{text}, and the reply is lost", after, Transition.RECOVER, fault=Fault.REPLY)
    else:
        yield Change(f"worker {i}: is done with it", _finished(state, i, rules))


def _renews(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker, row = state.workers[i], state.row
    if row.status is Status.SENDING and worker.owns:
        after = _lease_prolonged(state, rules)
        yield Change(f"worker {i}: renews its lease", _worker_is(after, i, confirmed=True))
        yield Change(f"worker {i}: renews its lease, and the reply is lost", after, fault=Fault.REPLY)


def _goes_wrong(state: State, i: int, rules: Rules) -> Iterator[Change]:
    worker = state.workers[i]
    if worker.step is Step.IDLE and worker.late is Late.NONE and i not in (state.row.owner, state.row.rescued):
        return
    messages = state.messages + worker.has_message
    back = state._replace(messages=messages)
    yield Change(f"worker {i} dies", _worker_is(back, i, step=Step.DEAD, has_message=False), fault=Fault.DEATH)
    gone = _looks(_worker_is(back, i, **Worker()._asdict()), i, Look())
    if state.row.owner == i:
        gone = _row_is(gone, owner=GONE)
    if state.row.rescued == i:
        gone = _row_is(gone, rescued=GONE)
    yield Change(f"worker {i}'s host dies, its ledger is lost", gone, fault=Fault.HOST)
    if worker.has_message:
        after = _worker_is(back, i, has_message=False)
        yield Change(f"worker {i} loses its channel: its message comes again", after, fault=Fault.CHANNEL)
