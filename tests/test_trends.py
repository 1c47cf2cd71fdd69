"""A soak test distinguishes growth from noise."""

from __future__ import annotations

import random

import pytest

from benchmarks import soak_report
from benchmarks.trends import Tolerance, Verdict, trend

INSTANTS = [10.0 * number for number in range(360)]


@pytest.mark.parametrize(("per_hour", "verdict"), [(0.0, Verdict.FLAT), (5.0, Verdict.GROWS), (-5.0, Verdict.FALLS)])
def test_a_trend_is_found_despite_noise_and_a_quarter_of_outliers(per_hour: float, verdict: Verdict) -> None:
    chance = random.Random(1)
    values = [100 + per_hour * at / 3600 + chance.uniform(-0.5, 0.5) for at in INSTANTS]
    for wild in range(0, len(values), 5):
        values[wild] *= chance.uniform(1, 20)

    found = trend("memory", INSTANTS, values, Tolerance(1.0))

    assert found.verdict is verdict
    assert found.lowest <= per_hour <= found.highest


def test_changes_in_the_first_half_count_as_warm_up() -> None:
    values = [min(100.0, at / 10) for at in INSTANTS]

    assert trend("memory", INSTANTS, values, Tolerance(1.0)).verdict is Verdict.FLAT


def test_a_shorter_warm_up_is_judged_earlier() -> None:
    values = [min(100.0, at / 18) for at in INSTANTS]

    assert trend("latency", INSTANTS, values, Tolerance(1.0)).verdict is Verdict.FLAT
    assert trend("latency", INSTANTS, values, Tolerance(1.0, settles=0.1)).verdict is Verdict.GROWS


def test_a_slope_that_may_be_chance_is_noise() -> None:
    chance = random.Random(3)
    values = [chance.uniform(0, 1000) for _ in INSTANTS]

    assert trend("latency", INSTANTS, values, Tolerance(0.0)).verdict is Verdict.NOISY


def test_the_tolerance_is_the_larger_of_an_amount_and_a_share() -> None:
    values = [1000 + 40 * at / 3600 for at in INSTANTS]

    assert trend("size", INSTANTS, values, Tolerance(10.0)).verdict is Verdict.GROWS
    assert trend("size", INSTANTS, values, Tolerance(10.0, 0.05)).verdict is Verdict.FLAT


def test_a_few_points_give_no_verdict() -> None:
    assert trend("memory", INSTANTS[:9], INSTANTS[:9], Tolerance(1.0)).verdict is Verdict.UNKNOWN
    assert trend("memory", [], [], Tolerance(1.0)).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("name", "is_ours"), [("latency.p50_ms", True), ("yardstick.commit_ms", False)])
def test_a_slower_machine_is_reported_and_not_a_failure(name: str, is_ours: bool) -> None:
    values = [10 + 10 * at / 3600 for at in INSTANTS]

    found = trend(name, INSTANTS, values, Tolerance(1.0))

    assert found.verdict is Verdict.GROWS
    assert bool(soak_report.growing([found])) is is_ours
