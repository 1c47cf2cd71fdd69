"""The statistics of the benchmarks, the comparison of two runs, and the baseline of instructions."""

from __future__ import annotations

import random
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import cpu, instructions, report, soak_report
from benchmarks import instruction_baseline as baseline
from benchmarks.cpu import Seen
from benchmarks.figures import Spread, latencies_ms, percentile
from benchmarks.floor import overhead_by_cpu, overhead_by_the_clock
from benchmarks.floor_parts import ELAPSED
from benchmarks.instructions import BACKEND, CLIENT
from benchmarks.page import mean_of, totals
from benchmarks.pages import RESULTS
from benchmarks.results import read_records
from benchmarks.trends import Tolerance, Verdict, trend


@pytest.mark.parametrize(("share", "expected"), [(50, 50), (99, 99), (100, 100), (0.1, 1)])
def test_a_percentile_is_the_smallest_figure_with_that_share_at_or_below_it(share: float, expected: int) -> None:
    assert percentile(range(1, 101), share) == expected


def test_latency_ends_at_the_first_acceptance_and_omits_emails_without_one() -> None:
    began = {"a": 10.0, "b": 10.0, "never": 10.0}

    assert latencies_ms(began, {"a": [10.5, 12.0], "b": [10.25]}) == [250.0, 500.0]


def test_a_spread_has_noise_and_detects_overlap() -> None:
    slow, fast, between = Spread.of([90, 100, 110]), Spread.of([150, 140, 160]), Spread.of([105, 120, 145])

    assert slow.median == 100
    assert slow.noise == pytest.approx(0.2)
    assert not slow.overlaps(fast)
    assert slow.overlaps(between)
    assert fast.overlaps(between)


def test_cpu_is_summed_by_role_under_run_and_by_tree_elsewhere() -> None:
    processes = [
        Seen(1, 0, 100.0),
        Seen(10, 1, 1.0),  # run
        Seen(11, 10, 2.0),
        Seen(12, 10, 4.0),
        Seen(13, 10, 8.0),
        Seen(14, 12, 16.0),  # a worker's child
        Seen(20, 1, 32.0),  # postgres
        Seen(21, 20, 64.0),
    ]
    roles = {11: "relay", 12: "worker", 13: "worker"}

    used = cpu.attribute(
        {each.pid: each for each in processes}, {"run": 10, "postgresql": 20, "double": 99}, roles.__getitem__
    )

    assert used == {"parent": 1.0, "relay": 2.0, "worker": 28.0, "postgresql": 96.0}


def test_a_metrics_page_is_summed_over_labels_without_buckets() -> None:
    page = totals(
        "# TYPE emails_total counter\n"
        'emails_total{provider="smtp"} 3\nemails_total{provider="ses"} 4\n'
        "# TYPE batch histogram\n"
        'batch_bucket{le="1"} 1\nbatch_bucket{le="+Inf"} 2\nbatch_sum 30\nbatch_count 2\n'
    )

    assert page == {"emails_total": 7, "batch_sum": 30, "batch_count": 2}
    assert mean_of("batch", page, {"batch_sum": 130, "batch_count": 4}) == 50


def test_the_overhead_is_the_cost_of_the_chain_beyond_its_parts() -> None:
    chain = {"client": 300.0, "postgresql": 150.0, "rabbitmq": 50.0, "double": 1.0, ELAPSED: 180.0}
    floor = {"client": 250.0, "postgresql": 100.0, "rabbitmq": 50.0, "double": 99.0, ELAPSED: 160.0}

    assert (overhead_by_cpu(chain, floor), overhead_by_the_clock(chain, floor)) == (0.25, 0.125)


def test_runs_are_compared_by_case_with_ratio_and_ranges() -> None:
    before = [_record(workers=2, rate=rate) for rate in (950, 1000, 1050)]
    after = [_record(workers=2, rate=rate) for rate in (1450, 1500, 1550)]
    out = StringIO()

    Console(file=out, width=200).print(report.comparison(before, [*after, _record(workers=4, rate=1)]))

    for words in ("1,000 (950 \u2013 1,050)", "1,500 (1,450 \u2013 1,550)", "1.50", "separate", "only in one run"):
        assert words in out.getvalue()


def _record(*, workers: int, rate: float) -> dict[str, Any]:
    """The record of a committed result, with these figures."""
    record: dict[str, Any] = {**read_records(RESULTS / "latency")[0], "emails_per_second": rate}
    record["case"] |= {"workers": workers, "rate": None}
    return record


@pytest.mark.slow
def test_no_count_of_instructions_is_above_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert instructions.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "part", "counts", "words"),
    [
        ("3.11", "lease 72", {CLIENT: 50_900.0, BACKEND: 80_000.0}, None),
        ("3.11", "lease 72", {CLIENT: 50_000.0, BACKEND: 103_000.0}, "lease 72, PostgreSQL: +3.0%, from 100,000 to"),
        ("3.11", "idle second, relay", {CLIENT: 11_500.0}, None),
        ("3.11", "idle second, relay", {CLIENT: 12_000.0}, "idle second, relay, client: +33.3%"),
        ("3.11", "scrape", {CLIENT: 1.0}, "scrape, client: baseline.json has no count."),
        ("3.14", "scrape", {CLIENT: 1.0}, "no counts for this build: 3.14"),
    ],
)
def test_a_count_above_the_baseline_is_named(
    build: str, part: str, counts: dict[str, float], words: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "baseline.json"
    figures = {"lease 72": {CLIENT: 50_000.4, BACKEND: 100_000.0}, "idle second, relay": {CLIENT: 9_000.0}}
    baseline.write("3.11", figures, "the first counts", file)

    findings = baseline.findings(build, {part: counts}, file)

    assert len(findings) == (words is not None)
    assert not words or words in findings[0]


def test_the_baseline_is_not_moved_without_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert instructions.main(["--write-baseline"]) == 2
    assert "say why the counts changed" in capsys.readouterr().err
    assert all(baseline.reasons())


INSTANTS = [10.0 * number for number in range(360)]
CHANCE = random.Random(3)


@pytest.mark.parametrize(
    ("values", "tolerance", "verdict"),
    [
        ([min(100.0, at / 10) for at in INSTANTS], Tolerance(1.0), Verdict.FLAT),  # the warm-up
        ([CHANCE.uniform(0, 1000) for _ in INSTANTS], Tolerance(0.0), Verdict.NOISY),  # the slope may be chance
        ([100 - 5 * at / 3600 + CHANCE.uniform(-0.5, 0.5) for at in INSTANTS], Tolerance(1.0), Verdict.FALLS),
        ([1000 + 40 * at / 3600 for at in INSTANTS], Tolerance(10.0), Verdict.GROWS),
        ([1000 + 40 * at / 3600 for at in INSTANTS], Tolerance(10.0, 0.05), Verdict.FLAT),  # the larger limit counts
        ([1.0] * 9, Tolerance(1.0), Verdict.UNKNOWN),
    ],
)
def test_a_soak_test_distinguishes_growth_from_warm_up_and_noise(
    values: list[float], tolerance: Tolerance, verdict: Verdict
) -> None:
    assert trend("memory", INSTANTS[: len(values)], values, tolerance).verdict is verdict


def test_growth_is_found_despite_outliers_and_a_slower_machine_is_no_failure() -> None:
    values = [(100 + 5 * at / 3600) * (1 if number % 5 else 20) for number, at in enumerate(INSTANTS)]

    found = [trend(name, INSTANTS, values, Tolerance(1.0)) for name in ("latency.p50_ms", "yardstick.commit_ms")]

    assert [each.verdict for each in found] == [Verdict.GROWS] * 2
    assert soak_report.growing(found) == [found[0]]
