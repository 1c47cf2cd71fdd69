"""The proof on a cluster, in small: `./run chaos --cluster` is the same for minutes, with every fault."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.chaos.cluster_storm import DECK, PAUSE_SECONDS, cluster_ground, measured
from tests.chaos.storm import Plan, play

FAULTS = ("kill leading node", "freeze primary", "freeze standby", "freeze leading node")


@pytest.mark.slow
def test_a_cluster_whose_leaders_are_killed_and_frozen_goes_on_within_seconds_and_loses_and_repeats_nothing() -> None:
    plan = Plan(seconds=120, seed=1, rate=50.0, hosts=1, deck=DECK, pause_seconds=PAUSE_SECONDS)
    # A short path: cookies live in it.
    with tempfile.TemporaryDirectory(prefix="dispatcher-cluster-") as folder:
        with cluster_ground(plan, Path(folder), print, FAULTS) as (ground, faults):
            verdict = play(plan, ground, Path(folder), print).verdict
        found = measured(faults, Path(folder))

    assert verdict.is_good, {name: list(found)[:5] for name, found in verdict.violations.items()}
    assert (verdict.lost, verdict.duplicates) == (0, 0)
    assert [each.fault.name for each in found] == list(FAULTS)
    assert not [each for each in found if each.is_too_long]
