"""The guarantees, which no reachable state may break; and a search of every reachable state, breadth first, so that a
counterexample is as short as possible."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dispatcher.domain.status import FINISHED, OnUncertain, Status, Transition
from dispatcher.worker.in_flight_email import EmailState
from tests.model.protocol import Change, Rules, changes
from tests.model.state import Answer, DeadLetter, State, Worker, canonical, tidy


def broken(state: State, rules: Rules) -> str | None:
    """The guarantee that this state breaks; None if the state breaks no guarantee."""
    row, accepted = state.row, state.accepted
    allowed = 1 + state.resent
    if any(worker.not_allowed for worker in state.workers):
        return "an event happened to a leased email for which the table of transitions has no row"
    if accepted > allowed:
        return f"accepted {accepted} times, {allowed} allowed"
    if state.wrong or state.sent_after_event:
        return state.wrong or "an event had proven the email, and another send began"
    if row.status is Status.SENT and accepted == 0:
        return "sent, but never accepted"
    if row.status is Status.FAILED and accepted and rules.policy is OnUncertain.HOLD and not state.resent:
        return "failed, but accepted"
    if row.status is Status.HELD and not state.may_be_held:
        return "held, but no ledger ever had it as on the wire"
    if wrong := _wrong_messages(state):
        return wrong
    if _is_cancelled_wrongly(state, rules):
        return "cancelled as not sent, but accepted"
    if row.status is not Status.SENT and not state.promoted and any(_dropped(worker) for worker in state.workers):
        return "a worker treats an acceptance as recorded, but the email is not sent"
    return None


def _wrong_messages(state: State) -> str | None:
    row = state.row
    if row.status is Status.CANCELLED and (row.due or row.dead_letter is DeadLetter.DUE):
        return "cancelled, and a message or a dead letter is due"
    if row.status is Status.PENDING and not _is_announced(state):
        return "pending, but neither due nor in a message"
    if row.status in (Status.FAILED, Status.HELD) and row.dead_letter is DeadLetter.NONE:
        return f"{row.status} without a dead letter"
    return None


def _is_cancelled_wrongly(state: State, rules: Rules) -> bool:
    """Under hold, no email was on the wire before it was cancelled, unless it was held."""
    is_certain = rules.policy is OnUncertain.HOLD and not rules.keys and not state.resent
    return state.cancelled and is_certain and state.accepted > 0


def _dropped(worker: Worker) -> bool:
    return worker.email is EmailState.RECORDED and worker.outcome is Answer.ACCEPTED


def is_final(state: State) -> bool:
    """Whether no process has anything left to do for the email."""
    return state.row.status in FINISHED and state.row.dead_letter is not DeadLetter.DUE


def _is_announced(state: State) -> bool:
    """Whether the email will reach a worker, or a final status, even if every process dies now, and without recovery of
    lost messages."""
    row = state.row
    held = any(worker.has_message for worker in state.workers)
    return row.due or state.messages > 0 or held or state.purged or row.in_doubt or row.proven or row.is_over


INITIAL = State()


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A broken guarantee, and the shortest path to the state that breaks it."""

    promise: str
    trace: tuple[Change, ...]

    def __str__(self) -> str:
        lines = [f"{number:3d}  {_line(change)}" for number, change in enumerate(self.trace, 1)]
        return "\n".join([self.promise, *lines])


@dataclass(frozen=True, slots=True)
class Found:
    """The numbers of the found states and steps, all status transitions, and the number of final states by status."""

    states: int
    steps: int
    moves: frozenset[tuple[Status, Transition, Status]]
    ends: Counter[Status]
    counterexample: Counterexample | None


def search(rules: Rules, *, most_states: int | None = None) -> Found:
    """Searches every reachable state, or `most_states`, and stops at the first state that breaks a guarantee."""
    with _without_garbage_collection():
        return _search(rules, most_states)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector during the block. A search frees nothing, so collections would only cost time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _search(rules: Rules, most_states: int | None) -> Found:
    parents: dict[State, State | None] = {INITIAL: None}
    undisturbed: dict[State, list[State]] = {}
    moves: set[tuple[Status, Transition, Status]] = set()
    ends: Counter[Status] = Counter()
    queue = deque([INITIAL])
    steps = 0

    def found(promise: str | None, last: State) -> Found:
        example = Counterexample(promise, tuple(_trace(parents, last, rules))) if promise else None
        return Found(len(parents), steps, frozenset(moves), ends, example)

    while queue:
        if most_states is not None and len(parents) > most_states:
            return found(None, INITIAL)
        state = queue.popleft()
        if is_final(state):
            ends[state.row.status] += 1
        for change in changes(state, rules):
            steps += 1
            after = canonical(change.after)
            if change.transition is not None:
                moves.add((state.row.status, change.transition, after.row.status))
            if change.fault is None:
                undisturbed.setdefault(after, []).append(state)
            if after in parents:
                continue
            parents[after] = state
            if promise := broken(after, rules):
                return found(promise, after)
            queue.append(after)
    stuck = _stuck(parents, undisturbed)
    return found("no path to a final state, even without further faults" if stuck else None, stuck or INITIAL)


def _stuck(parents: dict[State, State | None], undisturbed: dict[State, list[State]]) -> State | None:
    """The first state from which no final state can be reached without a further fault."""
    reached = {state for state in parents if is_final(state)}
    queue = deque(reached)
    while queue:
        for before in undisturbed.get(queue.popleft(), ()):
            if before not in reached:
                reached.add(before)
                queue.append(before)
    return next((state for state in parents if state not in reached), None)


def _trace(parents: dict[State, State | None], last: State, rules: Rules) -> Iterator[Change]:
    """The steps that lead to a state, in which each worker keeps its number."""
    path = [last]
    while (before := parents[path[-1]]) is not None:
        path.append(before)
    state = INITIAL
    for wanted in reversed(path[:-1]):
        change = next(change for change in changes(state, rules) if canonical(change.after) == wanted)
        yield change
        state = tidy(change.after)


def _line(change: Change) -> str:
    row = change.after.row
    moved = f"  [{change.transition}]" if change.transition else ""
    return f"{change.text}{moved}  → {row.status}, accepted {change.after.accepted}"
