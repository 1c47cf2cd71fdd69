"""Tests what the worker decides for each outcome, and that the table of transitions allows every decision."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.domain.decision import Decision, MarkFailed, MarkHeld, MarkSent, Redeliver, Resend, RetryIn, decide
from dispatcher.domain.outcome import (
    CONCERNS_PROVIDER,
    Accepted,
    Concern,
    Deferred,
    Outcome,
    PartialDelivery,
    Reason,
    Rejected,
    Uncertain,
    left_out,
)
from dispatcher.domain.provider_text import RELAY
from dispatcher.domain.retry import RetryLimits, RetryPolicy
from dispatcher.domain.status import FINISHED, TRANSITIONS, OnUncertain, Status, Transition

POLICY = RetryPolicy(max_attempts=3, base_seconds=1, cap_seconds=60)
HOURS = 3600.0
REFUSED, FULL, BUSY = Reason.REFUSED, Reason.RECIPIENT_DEFERRED, Reason.SERVER_ERROR
NO_USER = Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1")
GREYLISTED = Deferred(REFUSED, "greylisted", "451")
LATER = Deferred(REFUSED, "later", "450", 3600)
PINNED = Deferred(BUSY, "busy", "503")
DEFERRED = Deferred(FULL, "full", "452")
LOST = Uncertain("lost")


def after(
    outcome: Outcome,
    number: int = 1,
    on_uncertain: OnUncertain = OnUncertain.HOLD,
    limits: RetryLimits | None = None,
    key_seconds: float | None = None,
) -> Decision:
    return decide(outcome, number, on_uncertain, POLICY, lambda: 0.5, key_seconds=key_seconds, limits=limits)


def within(
    seconds: float = 4 * HOURS, redeliveries: int = 0, *, attempts: int | None = None, **options: Any
) -> dict[str, Any]:
    """The options of `after` for an email that has these seconds left, and had these redeliveries."""
    return {"limits": RetryLimits(attempts, seconds, redeliveries), **options}


def partial(retry_after: float | None = None, *, has_progress: bool = True, reason: Reason = FULL) -> Deferred:
    rest = PartialDelivery({1: None}, has_progress=has_progress)
    return Deferred(reason, "full", "452", retry_after, partial=rest)


RESEND: dict[str, Any] = {"on_uncertain": OnUncertain.RESEND}
FAILED_PARTLY = MarkFailed(Reason.PARTLY_DELIVERED, "full", "452")
GREYLISTED_FAILS = MarkFailed(REFUSED, "greylisted", "451")
CASES: dict[str, tuple[Outcome, int, dict[str, Any], Decision]] = {
    "accepted": (Accepted("<id>", "250 ok"), 1, {}, MarkSent("<id>", "250 ok")),
    "accepted at last": (Accepted(), 99, {}, MarkSent()),
    "deferred": (Deferred(BUSY), 1, {}, RetryIn(0.75)),
    "deferred again": (Deferred(BUSY), 2, {}, RetryIn(1.5)),
    "throttled with a time": (Deferred(Reason.THROTTLED, retry_after=20), 2, {}, RetryIn(21.5)),
    "no attempts left": (GREYLISTED, 3, {}, GREYLISTED_FAILS),
    "deferred for longer than the cap": (LATER, 1, {}, MarkFailed(REFUSED, "later", "450")),
    "rejected": (NO_USER, 1, {}, MarkFailed(NO_USER.reason, "no such user", "550 5.1.1")),
    "rejected, resend": (NO_USER, 1, RESEND, MarkFailed(NO_USER.reason, "no such user", "550 5.1.1")),
    "uncertain": (Uncertain("connection lost", "x"), 1, {}, MarkHeld("connection lost", "x")),
    "uncertain, resend": (LOST, 1, RESEND, Resend("lost")),
    "uncertain again, resend": (LOST, 2, RESEND, Resend("lost")),
    "uncertain at last, resend": (LOST, 3, RESEND, MarkHeld("lost")),
    # An attempt that delivers to some recipients does not use up the attempts.
    "the server limits the recipients of one transaction": (partial(0.0), 3, {}, RetryIn(0.0)),
    "that limit, with redeliveries": (partial(0.0), 3, within(), RetryIn(0.0)),
    "that limit, after the last redelivery": (partial(0.0), 3, within(59, 3), RetryIn(0.0)),
    "progress, as after the first attempt": (partial(), 3, {}, RetryIn(0.75)),
    "no progress": (partial(has_progress=False), 2, {}, RetryIn(1.5)),
    "no progress at last": (partial(0.0, has_progress=False), 3, {}, FAILED_PARTLY),
    # A deferral that used up its attempts is redelivered while there is time.
    "first redelivery": (GREYLISTED, 3, within(), Redeliver(60)),
    "third redelivery": (GREYLISTED, 3, within(redeliveries=2), Redeliver(900)),
    "attempts are left": (GREYLISTED, 2, within(redeliveries=1), RetryIn(1.5)),
    "no time is left": (GREYLISTED, 3, within(59), GREYLISTED_FAILS),
    "its lane allows more attempts than the host": (GREYLISTED, 3, within(0, attempts=5), RetryIn(3)),
    "its lane allows fewer attempts": (GREYLISTED, 1, within(0, attempts=1), GREYLISTED_FAILS),
    "asks for more than the cap": (Deferred(REFUSED, retry_after=2 * HOURS), 1, within(), Redeliver(2 * HOURS + 12)),
    "asks for more than is left": (Deferred(REFUSED, retry_after=5 * HOURS), 3, within(), MarkFailed(REFUSED)),
    "rejected, with time": (Rejected(REFUSED), 3, within(), MarkFailed(REFUSED)),
    "uncertain, with time": (LOST, 3, within(), MarkHeld("lost")),
    # A pinned email waits for its redelivery only if its key is alive then.
    "uncertain, pinned": (LOST, 3, within(key_seconds=HOURS), MarkHeld("lost")),
    "pinned, the key is alive": (PINNED, 3, within(redeliveries=3, key_seconds=3601), Redeliver(3600)),
    "pinned, the key ends": (PINNED, 3, within(redeliveries=3, key_seconds=3600), MarkHeld("busy", "503")),
    "pinned, rejected": (Rejected(REFUSED, "no"), 3, within(redeliveries=3, key_seconds=3601), MarkHeld("no")),
    # A deferred recipient gets one attempt per redelivery.
    "recipient, off": (DEFERRED, 1, {}, RetryIn(0.75)),
    "recipient, off for its lane": (DEFERRED, 1, within(0, attempts=5), RetryIn(0.75)),
    "recipient, expires before": (DEFERRED, 1, within(59), RetryIn(0.75)),
    "recipient, first": (DEFERRED, 1, within(), Redeliver(60)),
    "recipient, later": (DEFERRED, 1, within(3 * HOURS, 3), Redeliver(HOURS)),
    "recipient, last": (DEFERRED, 1, within(59, 3), MarkFailed(FULL, "full", "452")),
    "another reason": (Deferred(BUSY), 1, within(), RetryIn(0.75)),
}


@pytest.mark.parametrize(("outcome", "number", "options", "decision"), CASES.values(), ids=CASES)
def test_an_outcome_leads_to_a_decision(
    outcome: Outcome, number: int, options: dict[str, Any], decision: Decision
) -> None:
    assert after(outcome, number, **options) == decision
    status = TRANSITIONS[Status.SENDING, decision.transition]
    assert (status is Status.SENT) == isinstance(outcome, Accepted)
    assert (status is Status.SENDING) == isinstance(decision, RetryIn)


@pytest.mark.parametrize("reason", sorted(CONCERNS_PROVIDER))
def test_a_provider_outage_longer_than_the_cap_fails_no_email(reason: Reason) -> None:
    assert after(Deferred(reason, "later", "503", 3600)) == RetryIn(60)
    assert after(Deferred(reason, "later", "503", 3600), 3) == MarkFailed(reason, "later", "503")


@pytest.mark.parametrize("has_progress", [True, False], ids=["progress", "no progress"])
@pytest.mark.parametrize(
    ("options", "decision"),
    [({}, None), (within(59), None), (within(), Redeliver(60)), (within(59, 3), FAILED_PARTLY)],
    ids=["off", "expires before", "first", "last"],
)
def test_the_deferred_rest_of_a_partial_delivery_gets_one_attempt_per_redelivery(
    has_progress: bool, options: dict[str, Any], decision: Decision | None
) -> None:
    assert after(partial(has_progress=has_progress), 1, **options) == (decision or RetryIn(0.75))
    assert after(partial(has_progress=has_progress, reason=BUSY), 1, **options) == RetryIn(0.75)


def test_sent_is_final_and_only_an_operator_or_evidence_changes_failed_and_held() -> None:
    leaving: dict[Status, set[Transition]] = {status: set() for status in Status}
    for before, transition in TRANSITIONS:
        leaving[before].add(transition)

    decided = {Transition.REPLAY, Transition.EVIDENCE}
    changes = {Transition.RESCHEDULE, Transition.CANCEL, Transition.EXPIRE, Transition.EVIDENCE}
    # When a host is lost, recovery sets emails without evidence to `held`. If a worker of the host returns with
    # evidence, the evidence replaces that status. A held email that has expired needs no operator any more.
    found = {Transition.RECOVER, Transition.FAIL, Transition.EXPIRE, Transition.REDELIVER}
    assert {status: leaving[status] for status in (*FINISHED, Status.PENDING, Status.WAITING)} == {
        Status.SENT: set(),
        Status.FAILED: decided,
        Status.HELD: decided | found,
        Status.CANCELLED: {Transition.EVIDENCE},
        Status.PENDING: changes | {Transition.LEASE, Transition.HOLD},
        Status.WAITING: changes | {Transition.WAKE},
    }


@pytest.mark.parametrize(
    ("detail", "recipients"),
    [
        (None, None),
        ("250 2.0.0 queued", None),
        ("refused recipients: 2 (550 5.1.1)", "2 (550 5.1.1)"),
        ("refused recipients: 2 (550 5.1.1), 3 (451); 250 2.0.0 queued; thanks", "2 (550 5.1.1), 3 (451)"),
    ],
)
def test_an_acceptance_lists_the_recipients_that_it_refused(detail: str | None, recipients: str | None) -> None:
    assert left_out(detail) == recipients


@pytest.mark.parametrize(
    ("refusal", "concern"),
    [
        (Deferred(FULL), Concern.EMAIL),
        (Deferred(BUSY), Concern.EITHER),
        (Deferred(Reason.CONNECTION_FAILED), Concern.PROVIDER),
        (Deferred(Reason.CONNECTION_FAILED, known_concern=Concern.EMAIL), Concern.EMAIL),
        (Deferred(FULL, fault=RELAY), Concern.EITHER),
        (NO_USER, Concern.EMAIL),
        (Rejected(Reason.INVALID_CONTENT, code="422"), Concern.EMAIL),
        (Rejected(REFUSED, code="550"), Concern.EITHER),
        (Rejected(Reason.REJECTED_SENDER, code="553"), Concern.EITHER),
        (Rejected(Reason.REJECTED_SENDER), Concern.EMAIL),
    ],
)
def test_the_concern_of_a_refusal_comes_from_the_adapter_or_from_its_reason(
    refusal: Deferred | Rejected, concern: Concern
) -> None:
    assert refusal.concern is concern
