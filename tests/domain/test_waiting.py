"""Tests the reason why an email waits: the first condition that is not met, as a code and a sentence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatcher.domain.status import Status
from dispatcher.domain.waiting import Facts, ProviderProblem, WaitReason, explain_wait

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
REFUSES = ProviderProblem("smtp", "open", 2, "SMTP refuses our credentials (535).", 25.0)
FAILS = ProviderProblem("smtp", "half_open", 2, "connection_failed", None)
BUSY = ProviderProblem("smtp", "open", 2, "server_error (421 4.3.2): too busy", None)
WAITS: dict[str, Any] = {"status": Status.WAITING, "wait_until": NOW + SECOND}
THROTTLES = ProviderProblem("ses", "paused", 2, "throttled", 90.0)


def facts(**changes: Any) -> Facts:
    """Facts about a queued email while two workers run."""
    usual: dict[str, Any] = {"now": NOW, "status": Status.PENDING, "was_leased": False, "due_at": None, "ahead": 7}
    usual |= {"locked_until": NOW, "error_type": None, "has_owner": False, "has_relay": True, "workers": 2}
    return Facts(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "reason", "until"),
    [
        ({}, WaitReason.QUEUED, None),
        ({"workers": 0}, WaitReason.NO_WORKER, None),
        ({"due_at": NOW - SECOND, "has_relay": False}, WaitReason.NO_RELAY, None),
        ({"due_at": NOW - 5 * SECOND}, WaitReason.QUEUED, None),
        ({"due_at": NOW - 90 * SECOND, "ahead": 0}, WaitReason.UNPUBLISHED, None),
        ({"due_at": NOW - SECOND, "is_blocked": True}, WaitReason.UNPUBLISHED, None),
        ({"is_blocked": True}, WaitReason.QUEUED, None),  # its message is on the send queue
        ({"due_at": NOW + 20 * SECOND, "was_leased": True}, WaitReason.NOT_DUE, NOW + 20 * SECOND),
        ({"due_at": NOW + 20 * SECOND}, WaitReason.QUEUED, None),  # the HTTP API has published it
        ({"troubles": [REFUSES]}, WaitReason.PROVIDER_REFUSES, NOW + 25 * SECOND),
        ({"troubles": [FAILS]}, WaitReason.PROVIDER_FAILS, None),
        ({"troubles": [BUSY]}, WaitReason.PROVIDER_FAILS, None),
        ({"troubles": [THROTTLES]}, WaitReason.PROVIDER_PAUSED, NOW + 90 * SECOND),
        ({"troubles": [REFUSES, THROTTLES]}, WaitReason.PROVIDER_REFUSES, NOW + 25 * SECOND),
        ({"troubles": [REFUSES], "workers": 3}, WaitReason.QUEUED, None),  # the third worker can still use it
        ({**WAITS, "wait_reason": "scheduled"}, WaitReason.SCHEDULED, NOW + SECOND),
        ({**WAITS, "wait_reason": "redelivery", "has_relay": False}, WaitReason.REDELIVERY, NOW + SECOND),
        ({"status": Status.WAITING, "wait_until": NOW - SECOND, "has_relay": False}, WaitReason.NO_RELAY, None),
        ({"status": Status.SENDING, "has_owner": True}, WaitReason.LEASED, NOW),
        ({"status": Status.SENDING}, WaitReason.WORKER_LOST, NOW + 10 * SECOND),
    ],
)
def test_the_first_unmet_condition_is_the_reason(
    changes: dict[str, Any], reason: WaitReason, until: datetime | None
) -> None:
    found = explain_wait(facts(**changes), recovery_seconds=10.0)

    assert (found.reason, found.until) == (reason, until)


def test_a_provider_is_the_reason_only_if_no_other_can_be_used() -> None:
    found = facts(troubles=[REFUSES])
    alone, one_of_two = (explain_wait(found, providers=names) for names in (["smtp"], ["smtp", "ses"]))

    assert (alone.reason, one_of_two.reason) == (WaitReason.PROVIDER_REFUSES, WaitReason.QUEUED)
    assert "smtp refuses all emails: SMTP refuses our credentials (535)." in one_of_two.detail


def test_a_lock_comes_first_and_its_holders_are_named() -> None:
    found = explain_wait(facts(workers=0), holders=["pid 7 (psql), idle in transaction"])

    assert found.reason is WaitReason.LOCKED
    assert found.detail == "Another transaction holds a lock on the email's row: pid 7 (psql), idle in transaction."


def test_a_rate_limit_that_slows_the_queue_is_named() -> None:
    assert explain_wait(facts(ceilings={"smtp": 2.5})).detail.endswith("smtp gets at most 2.5 emails per second.")


def test_a_planned_wait_says_because_of_what() -> None:
    deferred = {"attempt_count": 7, "provider": "smtp", "error_type": "recipient_deferred"}

    scheduled = explain_wait(facts(**WAITS, wait_reason="scheduled"))
    redelivery = explain_wait(facts(**WAITS, **deferred, wait_reason="redelivery"))

    assert scheduled.detail == "The email waits because it is scheduled."
    assert redelivery.because == "smtp deferred it (attempt 7: recipient_deferred)"
    assert redelivery.detail == f"The email waits because {redelivery.because}."
