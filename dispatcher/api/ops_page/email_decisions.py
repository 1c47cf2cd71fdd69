"""What an operator may decide about one email now, what each decision would do, and what a decision has done.

The functions of `ops` carry out the decisions, each with one conditional statement. This module only chooses the
buttons of a page, and the words for the results. A page that is out of date does no harm: if the email has changed, the
statement changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.actions.batch import Batch
from dispatcher.actions.dlq import OUTCOMES, DiscardDead, StopReplay
from dispatcher.actions.held import Confirm, Release
from dispatcher.actions.runner import Face, Who, run, run_batch
from dispatcher.actions.unsent import Cancel, Reschedule
from dispatcher.domain.email_history import EmailRow
from dispatcher.domain.failures import DEAD, ItemOutcome, ReplayState, Selection
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import StoreBusy
from dispatcher.ops import replaying
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import EmailHistory
from dispatcher.store.connections import AsyncSession

LOCK_SECONDS: Final = 1.0
"""How long a replay of one email waits while another transaction holds a lock on the email's row."""
TWICE: Final = "The recipient may get the email twice."


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about an email.

    Attributes:
        name: The last part of the form's path, and the action's name in the audit log.
        label: The button's text.
        done: What the page says when the decision has been carried out.
        statuses: The statuses in which the decision is possible.
        does: What the decision does. The page says this before the visitor confirms.
        is_final: Whether the decision cannot be undone.
        needs_time: Whether the form asks for a time.
    """

    name: str
    label: str
    done: str
    statuses: frozenset[Status]
    does: str
    is_final: bool = False
    needs_time: bool = False


DECISIONS: Final[Mapping[str, Decision]] = {
    each.name: each
    for each in (
        Decision(
            "replay",
            "Replay",
            "The email is pending, and will be sent again.",
            frozenset({Status.FAILED}),
            "Sends the email again: it becomes pending, gets all its attempts again, and its dead letter is removed.",
        ),
        Decision(
            "confirm",
            "Confirm",
            "The status of the email is now sent.",
            frozenset({Status.HELD}),
            "Records that the email arrived: its status becomes sent, and it is never sent again.",
            is_final=True,
        ),
        Decision(
            "release",
            "Release",
            "The email is pending, and will be sent again.",
            frozenset({Status.HELD}),
            f"Sends the email again, although it may have arrived. {TWICE}",
        ),
        Decision(
            "reschedule",
            "Reschedule",
            "The email waits until its new time.",
            frozenset({Status.PENDING, Status.WAITING}),
            "Sends the email at another time, or at once if that time has passed.",
            needs_time=True,
        ),
        Decision(
            "cancel",
            "Cancel",
            "The email is cancelled, and is never sent.",
            frozenset({Status.PENDING, Status.WAITING}),
            "The email is never sent. To send it after all, enqueue it again with another message key.",
            is_final=True,
        ),
        Decision(
            "discard",
            "Discard dead letter",
            "The email's dead letter is discarded.",
            frozenset({Status.FAILED, Status.HELD}),
            "Removes the email from the lists and counts of failures. The email keeps its status, and is not sent. "
            "Until its content is deleted, it can still be replayed or released.",
        ),
    )
}
"""Every decision by its name, in the order of the buttons."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A decision that is possible now.

    Attributes:
        does: What the decision would do to this email.
    """

    decision: Decision
    does: str


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be decided about an email now.

    Attributes:
        offers: The possible decisions.
        notes: Sentences that say why other decisions, or all decisions, are not possible.
    """

    offers: tuple[Offer, ...]
    notes: tuple[str, ...]

    def offer(self, name: str) -> Offer | None:
        """The offer whose decision has this name; None if the decision is not possible now."""
        return next((each for each in self.offers if each.decision.name == name), None)


_NO_CHOICE: Final[Mapping[Status, str]] = {
    Status.SENDING: "A worker has leased the email. Nothing can be decided until the attempt ends.",
    Status.SENT: "The email is sent. Nothing is left to decide.",
    Status.CANCELLED: "The email is cancelled, and is never sent.",
}
_NOT_REPLAYABLE: Final[Mapping[ItemOutcome, str]] = {
    ItemOutcome.EXPIRED: "The email cannot be sent again: it has expired.",
    ItemOutcome.CONTENT_PRUNED: "The email cannot be sent again: its content was deleted.",
}


async def find_choices(session: AsyncSession, email: EmailRow) -> Choices:
    """What may be decided about an email now.

    Args:
        email: As in `EmailHistory.email`.
    """
    status = email.status
    if status in _NO_CHOICE:
        return Choices((), (_NO_CHOICE[status],))
    outcome = await _replay_outcome(session, email.email_id) if status in DEAD else None
    notes = [_NOT_REPLAYABLE[outcome]] if outcome is not None and outcome in _NOT_REPLAYABLE else []
    offers = []
    for decision in DECISIONS.values():
        if status not in decision.statuses:
            continue
        if decision.name in ("replay", "release") and notes:
            continue
        if decision.name == "discard" and not _has_dead_letter(email):
            continue
        offers.append(Offer(decision, _does(decision, email)))
    return Choices(tuple(offers), tuple(notes))


async def _replay_outcome(session: AsyncSession, email_id: UUID) -> ItemOutcome | None:
    found = await replaying.preview(session, Selection(email_ids=(email_id,), discarded=None), include_held=True)
    return next(iter(found.counts), None)


def _has_dead_letter(email: EmailRow) -> bool:
    return email.dead_letter_discarded_at is None and email.error_type != Reason.SUPPRESSED


def _does(decision: Decision, email: EmailRow) -> str:
    more = []
    if decision.name == "replay" and email.was_uncertain:
        more.append(f"The outcome of an earlier attempt is unknown: the email may have arrived. {TWICE}")
    if decision.name == "replay" and email.error_type == Reason.SUPPRESSED:
        more.append("The email's recipients are suppressed. If the suppression was not removed, the email fails again.")
    if decision.is_final:
        more.append("This cannot be undone.")
    return " ".join([decision.does, *more])


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a decision.

    Attributes:
        why: Why nothing was changed; None if the decision was carried out.
        field: The form's field whose value prevented the decision; None if the email itself prevented the decision.
    """

    why: str | None = None
    field: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the decision was carried out."""
        return self.why is None


_LOCKED: Final = "Another transaction holds a lock on the email's row. Try again in a few seconds."


async def carry_out(
    session: AsyncSession, decision: Decision, history: EmailHistory, act: Act, *, send_at: datetime | None = None
) -> Result:
    """Carries out a decision and adds it to the audit log, if the email's status still permits the decision.

    Args:
        send_at: The new time, for `reschedule`.
    """
    email = history.email
    email_id, tenant_id = email.email_id, email.tenant_id
    try:
        match decision.name:
            case "replay":
                return await _replay(session, email_id, act)
            case "confirm":
                asked: Batch = Confirm(reason=act.reason)
            case "release":
                asked = Release(reason=act.reason)
            case "discard":
                asked = DiscardDead(reason=act.reason)
            case "cancel":
                asked = Cancel(reason=act.reason)
            case _:
                asked = Reschedule(reason=act.reason, send_at=send_at)
        return await _change(session, asked.but(tenant_id=tenant_id), email_id, act)
    except StoreBusy:
        return Result(_LOCKED)


async def _change(session: AsyncSession, asked: Batch, email_id: UUID, act: Act) -> Result:
    async for (judged,) in run_batch(session, asked, Who(Face.PAGE, act.actor), [email_id]):
        verdict = asked.verdict(judged.verdict)
        if verdict.is_success and not verdict.words.startswith("not"):
            return Result()
        words = (verdict.detail or verdict.words).format(status=judged.status)
        return Result(words if words.endswith(".") else f"{words}.", verdict.at or None)
    raise AssertionError


async def _replay(session: AsyncSession, email_id: UUID, act: Act) -> Result:
    """Replays one email immediately."""
    selection = Selection(email_ids=(email_id,), discarded=None)
    replay = await replaying.create(session, selection, act, include_held=True, per_second=None, source="ids")
    if replay.state is not ReplayState.DONE:  # another transaction has locked the row
        try:
            replay = (await replaying.run(session, replay.id, lock_seconds=LOCK_SECONDS)).replay
        finally:
            await run(session, StopReplay(replay_id=replay.id, reason=act.reason), Who(Face.PAGE, act.actor))
    for outcome in map(ItemOutcome, replay.outcomes):
        return Result(None if outcome is ItemOutcome.REPLAYED else f"Nothing was changed: {OUTCOMES[outcome]}.")
    return Result(_LOCKED)
