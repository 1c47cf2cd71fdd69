"""The guarantees, which no reachable state may break."""

from __future__ import annotations

from dispatcher.domain.status import FINISHED, OnUncertain, Status
from dispatcher.worker.in_flight_email import EmailState
from tests.model.protocol import Rules
from tests.model.state import Answer, DeadLetter, State, Worker


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
    """What is wrong with the messages and dead letters of the email's status."""
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
