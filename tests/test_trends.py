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


WARM_UP = [min(100.0, at / 10) for at in INSTANTS]
SHORT_WARM_UP = [min(100.0, at / 18) for at in INSTANTS]
SLOPE = [1000 + 40 * at / 3600 for at in INSTANTS]
CHANCE = random.Random(3)
NOISE = [CHANCE.uniform(0, 1000) for _ in INSTANTS]


@pytest.mark.parametrize(
    ("values", "tolerance", "verdict"),
    [
        (WARM_UP, Tolerance(1.0), Verdict.FLAT),
        (SHORT_WARM_UP, Tolerance(1.0), Verdict.FLAT),
        (SHORT_WARM_UP, Tolerance(1.0, settles=0.1), Verdict.GROWS),  # it is judged earlier
        (NOISE, Tolerance(0.0), Verdict.NOISY),  # the slope may be chance
        (SLOPE, Tolerance(10.0), Verdict.GROWS),
        (SLOPE, Tolerance(10.0, 0.05), Verdict.FLAT),  # the larger of an amount and a share counts
        (SLOPE[:9], Tolerance(1.0), Verdict.UNKNOWN),
        ([], Tolerance(1.0), Verdict.UNKNOWN),
    ],
)
def test_changes_of_the_warm_up_and_of_chance_are_no_growth(
    values: list[float], tolerance: Tolerance, verdict: Verdict
) -> None:
    assert trend("memory", INSTANTS[: len(values)], values, tolerance).verdict is verdict


@pytest.mark.parametrize(("name", "is_ours"), [("latency.p50_ms", True), ("yardstick.commit_ms", False)])
def test_a_slower_machine_is_reported_and_not_a_failure(name: str, is_ours: bool) -> None:
    values = [10 + 10 * at / 3600 for at in INSTANTS]

    found = trend(name, INSTANTS, values, Tolerance(1.0))

    assert found.verdict is Verdict.GROWS
    assert bool(soak_report.growing([found])) is is_ours
