"""Storms of a minute, on a private PostgreSQL and a shared RabbitMQ; and one of two minutes on a cluster."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.chaos.actions import KILLS
from tests.chaos.cluster_storm import DECK, PAUSE_SECONDS, cluster_ground, measured
from tests.chaos.mutants import MUTANTS
from tests.chaos.plan import Ground, StormPlan
from tests.chaos.storm import play

STORMS = {
    "seed 1": StormPlan(seconds=60, seed=1),
    "seed 2": StormPlan(seconds=60, seed=2),
    "seed 1, resend": StormPlan(seconds=60, seed=1, policy="resend"),
    "seed 2, resend": StormPlan(seconds=60, seed=2, policy="resend"),
    # At this rate, emails share messages only with small windows.
    "bundles": StormPlan(seconds=60, seed=3, rate=300.0, settings={"DISPATCHER_PREFETCH": "8"}),
    "smtp": StormPlan(seconds=60, seed=4, provider="smtp"),
    "events": StormPlan(seconds=60, seed=5, events=True),
    "redelivery and a domain's ceilings": StormPlan(
        seconds=60,
        seed=6,
        provider="smtp",
        settings={"DISPATCHER_REDELIVER_FOR": "60"},
        ceilings={"example.org": ("--concurrent=6", "--per-second=60")},
    ),
}


@pytest.mark.slow  # a minute for each storm
@pytest.mark.parametrize("plan", STORMS.values(), ids=STORMS)
def test_a_minute_of_random_faults_loses_and_repeats_nothing(ground: Ground, tmp_path: Path, plan: StormPlan) -> None:
    outcome = play(plan, ground, tmp_path, print)

    verdict = outcome.verdict
    assert verdict.is_good, {name: list(found)[:5] for name, found in verdict.violations.items()}
    assert verdict.lost == 0
    assert sum(outcome.actions.get(name, 0) for name in KILLS) >= 10
    assert verdict.counts["sent"] > 0.5 * verdict.enqueued > 0
    assert verdict.duplicates <= (0 if plan.policy == "hold" else verdict.uncertain)
    assert plan.policy == "hold" or "held" not in verdict.counts
    if plan is STORMS["smtp"]:  # some mailboxes get 4xx at every attempt, so their emails fail
        assert verdict.counts["failed"] > 0
    if plan.events:
        assert verdict.settled >= 10
        assert outcome.actions["release reported"] > 0


@pytest.mark.slow  # a storm for each mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(ground: Ground, tmp_path: Path, name: str) -> None:
    mutant = MUTANTS[name]

    verdict = play(mutant.apply_to(StormPlan(seconds=30, seed=1)), ground, tmp_path, print).verdict

    assert mutant.expected in verdict.violations


FAULTS = ("kill leading node", "freeze primary", "freeze standby", "freeze leading node")


@pytest.mark.slow  # two minutes on five servers
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
