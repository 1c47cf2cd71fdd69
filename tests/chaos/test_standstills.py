"""Tests how the standstill after each fault is computed from the times of acceptance."""

from __future__ import annotations

import pytest

from tests.chaos.faults import ClusterFault, standstills


def seconds(faults: list[ClusterFault], accepted_at: list[float], ended_at: float) -> list[float]:
    return [each.seconds for each in standstills(faults, accepted_at, ended_at)]


def test_a_standstill_is_the_longest_gap_after_the_fault() -> None:
    assert seconds([ClusterFault("f", 10.0)], [9.9, 10.5, 13.5, 14.0], 15.0) == [3.0]


def test_a_standstill_counts_from_the_fault_and_not_from_the_acceptance_before_it() -> None:
    assert seconds([ClusterFault("f", 10.0)], [4.0, 12.0, 12.5], 13.0) == [2.0]


def test_a_gap_that_spans_the_next_fault_counts_for_both() -> None:
    assert seconds([ClusterFault("f", 10.0), ClusterFault("g", 15.0)], [11.0, 20.0, 20.5], 21.0) == [9.0, 5.0]


@pytest.mark.parametrize("accepted_at", [[], [9.0], [9.0, 10.5]])
def test_no_acceptance_until_the_end_is_a_standstill_until_the_end(accepted_at: list[float]) -> None:
    assert seconds([ClusterFault("f", 10.0)], accepted_at, 30.0)[0] >= 19.5


def test_after_a_lost_quorum_the_time_without_it_is_excused() -> None:
    (found,) = standstills([ClusterFault("f", 10.0, quorum_since=40.0)], [9.0, 42.0, 43.0], 50.0)

    assert (found.seconds, found.seconds_after_quorum) == (32.0, 7.0)
    assert not found.is_too_long


def test_a_standstill_above_fifteen_seconds_is_too_long() -> None:
    (found,) = standstills([ClusterFault("f", 10.0)], [9.0, 25.5, 26.0], 27.0)

    assert found.is_too_long
