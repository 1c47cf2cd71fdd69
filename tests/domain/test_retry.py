"""Tests how long a deferred email, or a process during an outage, waits before it tries again."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dispatcher.domain.retry import Backoff, RetryLimits, RetryPolicy

POLICY = RetryPolicy(max_attempts=5, base_seconds=1, cap_seconds=60)
PATIENT = RetryPolicy(max_attempts=100_000, base_seconds=1, cap_seconds=60)


def always(value: float) -> Callable[[], float]:
    return lambda: value


@pytest.mark.parametrize(
    ("policy", "next_attempt", "asked", "chance", "seconds"),
    [
        *((POLICY, 2, None, chance, (1 + chance) / 2) for chance in (0.0, 0.5, 1.0)),
        *((POLICY, each, None, 1.0, longest) for each, longest in ((3, 2), (4, 4), (5, 8))),  # the longest wait doubles
        *((PATIENT, each, None, 1.0, 60) for each in (8, 100_000)),  # the cap bounds every wait
        (POLICY, 6, None, 0.0, None),  # no attempt follows the last
        (RetryPolicy(1, 1, 60), 2, None, 0.0, None),
        (POLICY, 2, 30, 0.0, 30.5),  # jitter is added to the wait that the provider asked for
        (POLICY, 2, 30, 0.5, 30.75),
        *((POLICY, each, 60, 1.0, 60) for each in (2, 5)),
        *((POLICY, 2, asked, 0.0, None) for asked in (60.001, 86_400, math.inf, math.nan)),  # more than the cap
        *((POLICY, 3, asked, 0.5, 1.5) for asked in (0.0, -5.0, -math.inf)),  # no wait
    ],
)
def test_a_retry_waits_for_the_backoff_or_for_as_long_as_the_provider_asked(
    policy: RetryPolicy, next_attempt: int, asked: float | None, chance: float, seconds: float | None
) -> None:
    assert policy.wait_before(next_attempt, asked, always(chance)) == seconds


@pytest.mark.parametrize(("failovers", "waits"), [(1, [1 + 2 + 4, 8 + 16]), (2, [1 + 2 + 4 + 8 + 16]), (5, [])])
def test_a_round_of_failovers_is_followed_by_the_waits_that_the_failovers_leave_out(
    failovers: int, waits: list[float]
) -> None:
    policy = RetryPolicy(max_attempts=6, base_seconds=1, cap_seconds=60)
    ends = range(failovers + 1, 6, failovers + 1)

    assert [policy.wait_before(end + 1, None, always(1.0), failovers=failovers) for end in ends] == waits


@pytest.mark.parametrize(("redeliveries", "seconds"), [(0, 60), (1, 300), (2, 900), (3, 3600), (4, 3600), (99, 3600)])
def test_redeliveries_follow_after_1_5_and_15_minutes_and_then_hourly(redeliveries: int, seconds: float) -> None:
    limits = RetryLimits(None, 86_400, redeliveries)

    waits = [limits.redelivery_wait(None, always(chance)) for chance in (0.0, 0.5, 1.0)]

    assert waits == pytest.approx([0.8 * seconds, seconds, 1.2 * seconds])


@pytest.mark.parametrize(
    ("asked", "left", "waits"),
    [
        (None, 60.1, [48, 60, None]),  # no redelivery begins too late
        (None, 48.0, [None, None, None]),
        (None, -10.0, [None, None, None]),
        (40.0, 600.0, [48, 60, 72]),
        (300.0, 600.0, [300, 312, 324]),  # nor before the provider asked for it
        (600.0, 600.0, [None, None, None]),
        *((asked, 600.0, [48, 60, 72]) for asked in (math.nan, -math.inf, 0.0)),
        (math.inf, 600.0, [None, None, None]),
    ],
)
def test_a_redelivery_waits_as_long_as_the_provider_asked_and_begins_in_time(
    asked: float | None, left: float, waits: list[float | None]
) -> None:
    limits = RetryLimits(None, left, 0)

    assert [limits.redelivery_wait(asked, always(chance)) for chance in (0.0, 0.5, 1.0)] == waits


def test_waits_during_an_outage_double_up_to_the_cap_with_jitter_and_begin_again_after_a_reset() -> None:
    backoff = Backoff(base_seconds=1, cap_seconds=5)

    assert [backoff.next_wait(always(1.0)) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert backoff.next_wait(always(0.5)) == 2.5
    assert [backoff.reset(), backoff.reset()] == [True, False], "an outage ends once"
    assert backoff.next_wait(always(1.0)) == 1
    assert Backoff(base_seconds=0.5, cap_seconds=15, failures=10**6).next_wait(always(1.0)) == 15
