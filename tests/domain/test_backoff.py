"""Waits during an outage grow up to a maximum, with jitter."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.domain.retry import Backoff


@given(st.integers(0, 10**6))
def test_a_wait_is_within_its_bounds(failures: int) -> None:
    longest = min(15.0, 0.5 * 2.0 ** min(failures, 60))

    assert 0 <= Backoff(base_seconds=0.5, cap_seconds=15, failures=failures).next_wait(random.random) <= longest


def test_waits_double_up_to_the_cap() -> None:
    backoff = Backoff(base_seconds=1, cap_seconds=5)

    assert [backoff.next_wait(lambda: 1.0) for _ in range(5)] == [1, 2, 4, 5, 5]


def test_reset_ends_the_outage_once_and_restarts_the_waits() -> None:
    backoff = Backoff(base_seconds=1, cap_seconds=5)
    backoff.next_wait(lambda: 1.0)
    backoff.next_wait(lambda: 1.0)

    assert [backoff.reset(), backoff.reset()] == [True, False]
    assert backoff.next_wait(lambda: 1.0) == 1
