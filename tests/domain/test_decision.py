"""Tests what the worker decides for each outcome. The table of transitions allows every decision."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.decision import Decision, MarkFailed, MarkHeld, MarkSent, Redeliver, Resend, RetryIn, decide
from dispatcher.domain.outcome import (
    CONCERNS_PROVIDER,
    Accepted,
    Deferred,
    Outcome,
    PartialDelivery,
    Reason,
    Rejected,
    Uncertain,
)
from dispatcher.domain.retry import RetryLimits, RetryPolicy
from dispatcher.domain.status import FINISHED, TRANSITIONS, OnUncertain, Status, Transition

POLICY = RetryPolicy(max_attempts=3, base_seconds=1, cap_seconds=60)
HOLD, RESEND = OnUncertain.HOLD, OnUncertain.RESEND


def after(outcome: Outcome, attempt_number: int = 1, on_uncertain: OnUncertain = HOLD) -> Decision:
    return decide(outcome, attempt_number, on_uncertain, POLICY, lambda: 0.5)


def test_accepted_is_sent() -> None:
    assert after(Accepted("<id>", "250 ok")) == MarkSent("<id>", "250 ok")
    assert after(Accepted(), attempt_number=99) == MarkSent()


def test_deferred_is_retried_while_attempts_are_left() -> None:
    assert after(Deferred(Reason.SERVER_ERROR), attempt_number=1) == RetryIn(0.75)
    assert after(Deferred(Reason.SERVER_ERROR), attempt_number=2) == RetryIn(1.5)
    assert after(Deferred(Reason.THROTTLED, retry_after=20), attempt_number=2) == RetryIn(21.5)


@pytest.mark.parametrize(
    ("partial", "retry_after", "attempt_number", "decision"),
    [
        (PartialDelivery({1: None}), 0.0, 3, RetryIn(0.0)),  # the server limits the recipients of one transaction
        (PartialDelivery({1: None}), None, 3, RetryIn(0.75)),  # as after the first attempt
        (PartialDelivery({1: None}, has_progress=False), None, 2, RetryIn(1.5)),
        (PartialDelivery({1: None}, has_progress=False), 0.0, 3, MarkFailed(Reason.PARTLY_DELIVERED, "full", "452")),
    ],
)
def test_an_attempt_that_delivers_to_some_recipients_does_not_use_up_the_attempts(
    partial: PartialDelivery, retry_after: float | None, attempt_number: int, decision: Decision
) -> None:
    outcome = Deferred(Reason.RECIPIENT_DEFERRED, "full", "452", retry_after, partial=partial)

    assert after(outcome, attempt_number) == decision


def test_deferred_without_attempts_left_fails_with_its_own_reason() -> None:
    last = Deferred(Reason.CONNECTION_FAILED, "refused", "ECONNREFUSED")

    assert after(last, attempt_number=3) == MarkFailed(Reason.CONNECTION_FAILED, "refused", "ECONNREFUSED")


def test_deferred_for_longer_than_the_cap_fails_with_its_own_reason() -> None:
    assert after(Deferred(Reason.REFUSED, "later", "450", 3600)) == MarkFailed(Reason.REFUSED, "later", "450")


@pytest.mark.parametrize("reason", sorted(CONCERNS_PROVIDER))
def test_a_provider_outage_longer_than_the_cap_fails_no_email(reason: Reason) -> None:
    assert after(Deferred(reason, "later", "503", 3600)) == RetryIn(60)
    assert after(Deferred(reason, "later", "503", 3600), attempt_number=3) == MarkFailed(reason, "later", "503")


@pytest.mark.parametrize("on_uncertain", OnUncertain)
def test_rejected_fails_at_once(on_uncertain: OnUncertain) -> None:
    rejected = Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1")

    assert after(rejected, 1, on_uncertain) == MarkFailed(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1")


def test_uncertain_is_held_under_policy_hold() -> None:
    assert after(Uncertain("connection lost", "x"), 1, HOLD) == MarkHeld("connection lost", "x")


def test_uncertain_is_resent_under_policy_resend_while_attempts_are_left() -> None:
    assert after(Uncertain("lost"), 1, RESEND) == Resend("lost")
    assert after(Uncertain("lost"), 2, RESEND) == Resend("lost")
    assert after(Uncertain("lost"), 3, RESEND) == MarkHeld("lost")


HOURS = 3600.0


def at_the_last(
    outcome: Outcome, limits: RetryLimits | None, *, number: int = 3, key_seconds: float | None = None
) -> Decision:
    return decide(outcome, number, HOLD, POLICY, lambda: 0.5, key_seconds=key_seconds, limits=limits)


def test_a_deferral_that_used_up_its_attempts_is_redelivered_while_there_is_time() -> None:
    last = Deferred(Reason.REFUSED, "greylisted", "451")

    assert at_the_last(last, RetryLimits(None, 4 * HOURS, 0)) == Redeliver(60)
    assert at_the_last(last, RetryLimits(None, 4 * HOURS, 2)) == Redeliver(900)
    assert at_the_last(last, RetryLimits(None, 4 * HOURS, 1), number=2) == RetryIn(1.5), "attempts are left"
    assert at_the_last(last, RetryLimits(None, 59, 0)) == MarkFailed(Reason.REFUSED, "greylisted", "451")
    assert at_the_last(last, RetryLimits(5, 0, 0)) == RetryIn(3), "its lane allows more attempts than the host"
    assert at_the_last(last, RetryLimits(1, 0, 0), number=1) == MarkFailed(Reason.REFUSED, "greylisted", "451")


@pytest.mark.parametrize(
    ("reason", "limits", "decision"),
    [
        (Reason.RECIPIENT_DEFERRED, None, RetryIn(0.75)),
        (Reason.RECIPIENT_DEFERRED, RetryLimits(5, 0, 0), RetryIn(0.75)),
        (Reason.RECIPIENT_DEFERRED, RetryLimits(None, 59, 0), RetryIn(0.75)),
        (Reason.RECIPIENT_DEFERRED, RetryLimits(None, 4 * HOURS, 0), Redeliver(60)),
        (Reason.RECIPIENT_DEFERRED, RetryLimits(None, 3 * HOURS, 3), Redeliver(HOURS)),
        (Reason.RECIPIENT_DEFERRED, RetryLimits(None, 59, 3), MarkFailed(Reason.RECIPIENT_DEFERRED, "full", "452")),
        (Reason.SERVER_ERROR, RetryLimits(None, 4 * HOURS, 0), RetryIn(0.75)),
    ],
    ids=["off", "off for its lane", "expires before", "first", "later", "last", "another reason"],
)
def test_a_deferred_recipient_gets_one_attempt_per_redelivery(
    reason: Reason, limits: RetryLimits | None, decision: Decision
) -> None:
    assert at_the_last(Deferred(reason, "full", "452"), limits, number=1) == decision


@pytest.mark.parametrize("reason", [Reason.RECIPIENT_DEFERRED, Reason.SERVER_ERROR])
@pytest.mark.parametrize("has_progress", [True, False], ids=["progress", "no progress"])
@pytest.mark.parametrize(
    ("limits", "decision"),
    [
        (None, None),
        (RetryLimits(None, 59, 0), None),
        (RetryLimits(None, 4 * HOURS, 0), Redeliver(60)),
        (RetryLimits(None, 4 * HOURS, 1), Redeliver(300)),
        (RetryLimits(None, 59, 3), MarkFailed(Reason.PARTLY_DELIVERED, "2 of 3; grey", "451")),
    ],
    ids=["off", "expires before", "first", "later", "last"],
)
def test_the_deferred_rest_of_a_partial_delivery_gets_one_attempt_per_redelivery(
    reason: Reason, has_progress: bool, limits: RetryLimits | None, decision: Decision | None
) -> None:
    partial = PartialDelivery({1: None, 2: None}, has_progress=has_progress)
    outcome = Deferred(reason, "2 of 3; grey", "451", partial=partial)

    if decision is None or reason is not Reason.RECIPIENT_DEFERRED:
        decision = RetryIn(0.75)
    assert at_the_last(outcome, limits, number=1) == decision


@pytest.mark.parametrize("limits", [None, RetryLimits(None, 4 * HOURS, 0), RetryLimits(None, 59, 3)])
def test_the_rest_that_a_server_only_takes_in_another_transaction_waits_for_no_redelivery(
    limits: RetryLimits | None,
) -> None:
    outcome = Deferred(Reason.RECIPIENT_DEFERRED, "limit", "452", 0.0, partial=PartialDelivery({1: None}))

    assert at_the_last(outcome, limits, number=3) == RetryIn(0.0)


def test_a_server_that_asks_for_more_than_the_cap_gets_the_email_when_it_asked_for_it() -> None:
    assert at_the_last(Deferred(Reason.REFUSED, retry_after=2 * HOURS), RetryLimits(None, 4 * HOURS, 0), number=1) == (
        Redeliver(2 * HOURS + 12)
    )
    assert at_the_last(Deferred(Reason.REFUSED, retry_after=5 * HOURS), RetryLimits(None, 4 * HOURS, 0)) == (
        MarkFailed(Reason.REFUSED)
    )


def test_neither_rejections_nor_uncertain_outcomes_are_redelivered() -> None:
    limits = RetryLimits(None, 4 * HOURS, 0)

    assert at_the_last(Rejected(Reason.REFUSED), limits) == MarkFailed(Reason.REFUSED)
    assert at_the_last(Uncertain("lost"), limits) == MarkHeld("lost")
    assert at_the_last(Uncertain("lost"), limits, key_seconds=HOURS) == MarkHeld("lost")


def test_a_pinned_email_waits_for_its_redelivery_only_if_its_key_is_alive_then() -> None:
    last = Deferred(Reason.SERVER_ERROR, "busy", "503")
    limits = RetryLimits(None, 4 * HOURS, 3)

    assert at_the_last(last, limits, key_seconds=3601) == Redeliver(3600)
    assert at_the_last(last, limits, key_seconds=3600) == MarkHeld("busy", "503")
    assert at_the_last(Rejected(Reason.REFUSED, "no"), limits, key_seconds=3601) == MarkHeld("no")


def outcomes() -> st.SearchStrategy[Outcome]:
    text = st.none() | st.text(max_size=5)
    reason = st.sampled_from(Reason)
    return st.one_of(
        st.builds(Accepted, text, text),
        st.builds(Deferred, reason, text, text, st.none() | st.floats()),
        st.builds(Rejected, reason, text, text),
        st.builds(Uncertain, text, text),
    )


@given(outcomes(), st.integers(1, 200), st.sampled_from(OnUncertain), st.integers(1, 100))
def test_every_decision_is_a_valid_transition_from_sending(
    outcome: Outcome, attempt_number: int, on_uncertain: OnUncertain, max_attempts: int
) -> None:
    decision = decide(outcome, attempt_number, on_uncertain, RetryPolicy(max_attempts, 1, 60), lambda: 0.5)

    assert isinstance(decision, get_args(Decision))
    status = TRANSITIONS[Status.SENDING, decision.transition]
    assert (status is Status.SENT) == isinstance(outcome, Accepted)
    assert (status is Status.SENDING) == isinstance(decision, RetryIn)
    if isinstance(outcome, Uncertain) and on_uncertain is HOLD:
        assert status is Status.HELD


def test_no_two_decisions_make_the_same_transition() -> None:
    transitions = [decision.transition for decision in get_args(Decision)]

    assert len(set(transitions)) == len(transitions)


def test_sent_is_final_and_only_an_operator_or_evidence_changes_failed_and_held() -> None:
    leaving: dict[Status, set[Transition]] = {status: set() for status in Status}
    for before, transition in TRANSITIONS:
        leaving[before].add(transition)

    assert leaving[Status.SENT] == set()
    assert leaving[Status.FAILED] == {Transition.REPLAY, Transition.EVIDENCE}
    # When a host is lost, recovery sets emails without evidence to `held`. If a worker of the host returns with
    # evidence, the evidence replaces that status.
    # A held email that has expired needs no operator any more.
    assert leaving[Status.HELD] == leaving[Status.FAILED] | {
        Transition.RECOVER,
        Transition.FAIL,
        Transition.EXPIRE,
        Transition.REDELIVER,
    }
    assert leaving[Status.CANCELLED] == {Transition.EVIDENCE}
    changes = {Transition.RESCHEDULE, Transition.CANCEL, Transition.EXPIRE, Transition.EVIDENCE}
    assert leaving[Status.PENDING] == changes | {Transition.LEASE, Transition.HOLD}
    assert leaving[Status.WAITING] == changes | {Transition.WAKE}


def test_every_status_can_be_reached_and_every_transition_is_used() -> None:
    assert {Status.PENDING, *TRANSITIONS.values()} == set(Status)
    assert {transition for _, transition in TRANSITIONS} == set(Transition)


def test_only_a_transition_into_sending_pending_or_waiting_leaves_work_to_do() -> None:
    assert set(Status) - {Status.PENDING, Status.WAITING, Status.SENDING} == FINISHED
