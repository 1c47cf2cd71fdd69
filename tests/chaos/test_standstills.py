"""Tests how the standstill after each fault is computed from the times of acceptance."""

from __future__ import annotations

import pytest

from tests.chaos.faults import ClusterFault, standstills

F, G = ClusterFault("f", 10.0), ClusterFault("g", 15.0)


@pytest.mark.parametrize(
    ("faults", "accepted_at", "ended_at", "expected"),
    [
        pytest.param([F], [9.9, 10.5, 13.5, 14.0], 15.0, [3.0], id="the longest gap after the fault"),
        pytest.param([F], [4.0, 12.0, 12.5], 13.0, [2.0], id="from the fault, not from the acceptance before it"),
        pytest.param([F, G], [11.0, 20.0, 20.5], 21.0, [9.0, 5.0], id="a gap over two faults counts for both"),
        pytest.param([F], [], 30.0, [20.0], id="none: until the end"),
        pytest.param([F], [9.0], 30.0, [20.0], id="none after the fault: until the end"),
        pytest.param([F], [9.0, 10.5], 30.0, [19.5], id="one soon after the fault: until the end"),
    ],
)
def test_a_standstill_is_the_longest_time_without_an_acceptance(
    faults: list[ClusterFault], accepted_at: list[float], ended_at: float, expected: list[float]
) -> None:
    assert [each.seconds for each in standstills(faults, accepted_at, ended_at)] == expected


def test_after_a_lost_quorum_the_time_without_it_is_excused() -> None:
    (found,) = standstills([ClusterFault("f", 10.0, quorum_since=40.0)], [9.0, 42.0, 43.0], 50.0)

    assert (found.seconds, found.seconds_after_quorum) == (32.0, 7.0)
    assert not found.is_too_long


def test_a_standstill_above_fifteen_seconds_is_too_long() -> None:
    (found,) = standstills([ClusterFault("f", 10.0)], [9.0, 25.5, 26.0], 27.0)

    assert found.is_too_long
