"""Waits between attempts to connect grow up to a cap, and are spread."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.broker.backoff import Backoff


@given(st.integers(1, 10**6))
def test_a_wait_is_within_its_bounds(failures: int) -> None:
    longest = min(15.0, 0.5 * 2.0 ** min(failures - 1, 60))

    assert 0 <= Backoff(base_seconds=0.5, cap_seconds=15).wait_after(failures) <= longest


def test_waits_are_spread() -> None:
    backoff = Backoff(base_seconds=1, cap_seconds=64)

    waits = [backoff.wait_after(7) for _ in range(200)]

    assert min(waits) < 16
    assert max(waits) > 48
