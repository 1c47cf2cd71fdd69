"""A short storm on a cluster; `./run chaos --cluster` does the same for minutes, with every fault."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.chaos.cluster_storm import DECK, PAUSE_SECONDS, cluster_ground, measured
from tests.chaos.plan import StormPlan
from tests.chaos.storm import play

FAULTS = ("kill leading node", "freeze primary", "freeze standby", "freeze leading node")


@pytest.mark.slow
def test_killed_and_frozen_leaders_stop_sending_for_seconds_only_and_nothing_is_lost_or_repeated() -> None:
    plan = StormPlan(seconds=120, seed=1, rate=50.0, hosts=1, deck=DECK, pause_seconds=PAUSE_SECONDS)
    # The path is short, because the folder contains Erlang's cookie file, whose path must be short.
    with tempfile.TemporaryDirectory(prefix="dispatcher-cluster-") as folder:
        with cluster_ground(plan, Path(folder), print, FAULTS) as ground:
            verdict = play(plan, ground, Path(folder), print).verdict
        found = measured(ground.outages, Path(folder))

    assert verdict.is_good, {name: list(found)[:5] for name, found in verdict.violations.items()}
    assert (verdict.lost, verdict.duplicates) == (0, 0)
    assert [each.fault.name for each in found] == list(FAULTS)
    assert not [each for each in found if each.is_too_long]
