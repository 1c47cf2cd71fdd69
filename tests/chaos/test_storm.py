"""A short storm of some seconds, on a private PostgreSQL and a shared RabbitMQ.

`./run chaos` does the same for minutes, with a private RabbitMQ.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatcher.store import queries
from tests.chaos.actions import KILLS
from tests.chaos.mutants import MUTANTS
from tests.chaos.storm import Ground, StormOutcome, StormPlan, play


def assert_good(outcome: StormOutcome, *, kills: int) -> None:
    verdict = outcome.verdict
    assert verdict.is_good, {name: list(found)[:5] for name, found in verdict.violations.items()}
    assert verdict.lost == 0
    assert sum(outcome.actions.get(name, 0) for name in KILLS) >= kills
    assert verdict.counts["sent"] > 0.5 * verdict.enqueued > 0


def test_seconds_of_random_faults_lose_and_repeat_nothing(ground: Ground, tmp_path: Path) -> None:
    plan = StormPlan(seconds=5, seed=7, workers=1, lease_seconds=3, pause_seconds=(0.05, 0.4), patience_seconds=0.2)

    outcome = play(plan, ground, tmp_path, print)

    assert_good(outcome, kills=2)
    assert outcome.verdict.duplicates == 0


@pytest.mark.slow
def test_a_minute_of_random_faults_with_bundles_loses_and_repeats_nothing(ground: Ground, tmp_path: Path) -> None:
    windows = {"DISPATCHER_PREFETCH": "8"}  # at this rate, emails share messages only with small windows
    outcome = play(StormPlan(seconds=60, seed=3, rate=300.0, settings=windows), ground, tmp_path, print)

    assert_good(outcome, kills=10)
    assert outcome.verdict.duplicates == 0


@pytest.mark.slow
def test_a_minute_of_random_faults_over_smtp_loses_and_repeats_nothing(ground: Ground, tmp_path: Path) -> None:
    outcome = play(StormPlan(seconds=60, seed=4, provider="smtp"), ground, tmp_path, print)

    assert_good(outcome, kills=10)
    assert outcome.verdict.duplicates == 0
    # Some mailboxes get 4xx at every attempt, so their emails fail.
    assert outcome.verdict.counts["failed"] > 0


@pytest.mark.slow
def test_a_minute_of_random_faults_with_redelivery_and_a_domains_ceilings_loses_and_repeats_nothing(
    ground: Ground, tmp_path: Path
) -> None:
    plan = StormPlan(
        seconds=60,
        seed=6,
        provider="smtp",
        settings={"DISPATCHER_REDELIVER_FOR": "60"},
        ceilings={"example.org": ("--concurrent=6", "--per-second=60")},
    )

    outcome = play(plan, ground, tmp_path, print)

    assert_good(outcome, kills=10)
    assert outcome.verdict.duplicates == 0


@pytest.mark.slow
def test_a_minute_of_random_faults_with_events_leaves_no_accepted_email_held(ground: Ground, tmp_path: Path) -> None:
    outcome = play(StormPlan(seconds=60, seed=5, events=True), ground, tmp_path, print)

    assert_good(outcome, kills=10)
    assert outcome.verdict.duplicates == 0
    assert outcome.verdict.settled >= 10
    assert outcome.actions["release reported"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hold", "resend"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_of_random_faults_loses_and_repeats_nothing(
    ground: Ground, tmp_path: Path, seed: int, policy: str
) -> None:
    outcome = play(StormPlan(seconds=60, seed=seed, policy=policy), ground, tmp_path, print)

    assert_good(outcome, kills=10)
    assert outcome.verdict.duplicates <= (0 if policy == "hold" else outcome.verdict.uncertain)
    assert policy == "hold" or "held" not in outcome.verdict.counts


@pytest.mark.parametrize("name", ["fencing-off", "proof-ignored", "cancel-ignored"])
def test_a_mutant_of_a_statement_still_finds_the_condition_that_it_removes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = queries._sections()
    monkeypatch.setattr(queries, "_sections", queries._sections)  # restored after the test

    MUTANTS[name].switch_off()

    assert queries._sections() != product


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(ground: Ground, tmp_path: Path, name: str) -> None:
    mutant = MUTANTS[name]

    verdict = play(mutant.apply_to(StormPlan(seconds=30, seed=1)), ground, tmp_path, print).verdict

    assert mutant.expected in verdict.violations
