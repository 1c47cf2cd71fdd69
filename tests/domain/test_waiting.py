"""Why an email waits: the first hindrance on its way, in a word and a sentence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatcher.domain.status import Status
from dispatcher.domain.waiting import MOST_AHEAD, Facts, Trouble, Wait, why

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
REFUSES = Trouble("smtp", "open", 2, "SMTP refuses our credentials (535).", 25.0)
FAILS = Trouble("smtp", "half_open", 2, "connection_failed", None)
THROTTLES = Trouble("ses", "paused", 2, "throttled", 90.0)


def facts(**changes: Any) -> Facts:
    """An email that waits for its turn, among two workers."""
    usual: dict[str, Any] = {
        "now": NOW,
        "status": Status.PENDING,
        "was_leased": False,
        "due_at": None,
        "locked_until": NOW,
        "error_type": None,
        "has_owner": False,
        "has_relay": True,
        "workers": 2,
        "ahead": 7,
    }
    return Facts(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "reason", "until"),
    [
        ({}, Wait.QUEUED, None),
        ({"workers": 0}, Wait.NO_WORKER, None),
        ({"due_at": NOW - SECOND, "has_relay": False}, Wait.NO_RELAY, None),
        ({"due_at": NOW - 5 * SECOND}, Wait.QUEUED, None),
        ({"due_at": NOW - 90 * SECOND}, Wait.UNPUBLISHED, None),
        ({"due_at": NOW + 20 * SECOND, "was_leased": True}, Wait.NOT_DUE, NOW + 20 * SECOND),
        ({"due_at": NOW + 20 * SECOND}, Wait.QUEUED, None),  # the HTTP API has announced it
        ({"troubles": [REFUSES]}, Wait.PROVIDER_REFUSES, NOW + 25 * SECOND),
        ({"troubles": [FAILS]}, Wait.PROVIDER_FAILS, None),
        ({"troubles": [THROTTLES]}, Wait.PROVIDER_PAUSED, NOW + 90 * SECOND),
        ({"troubles": [REFUSES, THROTTLES]}, Wait.PROVIDER_REFUSES, NOW + 25 * SECOND),
        ({"troubles": [REFUSES], "workers": 3}, Wait.QUEUED, None),  # one worker uses it
        ({"status": Status.SENDING, "has_owner": True}, Wait.LEASED, NOW),
        ({"status": Status.SENDING}, Wait.WORKER_LOST, NOW + 10 * SECOND),
    ],
)
def test_the_first_unmet_condition_is_the_reason(changes: dict[str, Any], reason: Wait, until: datetime | None) -> None:
    found = why(facts(**changes), rescue_seconds=10.0)

    assert (found.reason, found.until) == (reason, until)


def test_a_provider_is_the_reason_only_while_no_other_is_left() -> None:
    one_away = facts(troubles=[REFUSES])

    assert why(one_away, providers=["smtp"]).reason is Wait.PROVIDER_REFUSES
    assert why(one_away, providers=["smtp", "ses"]).reason is Wait.QUEUED
    assert "smtp refuses us: SMTP refuses our credentials (535)." in why(one_away, providers=["smtp", "ses"]).detail


def test_a_lock_goes_before_everything_and_its_holders_are_named() -> None:
    found = why(facts(workers=0), holders=["pid 7 (psql), idle in transaction"])

    assert found.reason is Wait.LOCKED
    assert found.detail == "Another transaction holds a lock on its row: pid 7 (psql), idle in transaction."


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (0, "No email is ahead of it; 2 workers send."),
        (1, "1 email is ahead of it; 2 workers send."),
        (1234, "1,234 emails are ahead of it; 2 workers send."),
        (MOST_AHEAD, "10,000 or more emails are ahead of it; 2 workers send."),
    ],
)
def test_the_queue_ahead_is_counted_up_to_a_bound(ahead: int, words: str) -> None:
    found = why(facts(ahead=ahead))

    assert (found.detail, found.ahead) == (words, ahead)


def test_a_ceiling_that_slows_the_queue_is_named() -> None:
    assert why(facts(ceilings={"smtp": 2.5})).detail.endswith("smtp gets at most 2.5 emails per second.")
