"""Tests the statistics of the benchmarks."""

from __future__ import annotations

import math
import os

import pytest

from benchmarks import cpu
from benchmarks.cpu import Seen
from benchmarks.figures import Spread, ideal_rate, latencies_ms, machine_rate, per_email_us, percentile
from benchmarks.open_loop import read_arrivals, schedule
from benchmarks.page import mean_of, totals


@pytest.mark.parametrize(("share", "expected"), [(50, 50), (95, 95), (99, 99), (100, 100), (0.1, 1)])
def test_a_percentile_is_the_smallest_figure_with_that_share_at_or_below_it(share: float, expected: int) -> None:
    assert percentile(range(1, 101), share) == expected


def test_a_percentile_of_one_figure_is_that_figure() -> None:
    assert [percentile([7.0], share) for share in (0, 50, 99, 100)] == [7.0] * 4


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


def test_the_ideal_line_goes_through_the_case_with_the_fewest_workers() -> None:
    assert ideal_rate({2: 3000.0, 4: 4000.0}, 2) == 3000
    assert ideal_rate({2: 3000.0, 4: 4000.0}, 4) == 6000


def test_the_machine_rate_uses_all_cores() -> None:
    assert machine_rate(2, 500.0) == 4000
    assert machine_rate(2, 0.0) == 0


def test_cpu_per_email_is_the_difference_of_two_readings() -> None:
    used = per_email_us({"worker": 1.0}, {"worker": 3.0, "double": 0.5}, 1000)

    assert used == {"worker": pytest.approx(2000), "double": pytest.approx(500)}


def test_a_stat_line_is_parsed_whatever_the_process_name_contains() -> None:
    fields = ["S", "7", *["0"] * 9, "150", "50", "10", "20", "rest"]

    seen = cpu.read_stat(f"42 (a (b) c) {' '.join(fields)}")

    assert (seen.pid, seen.parent) == (42, 7)
    assert seen.seconds == pytest.approx(230 / os.sysconf("SC_CLK_TCK"))


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


def test_arrivals_have_the_requested_rate_and_repeat_for_the_same_seed() -> None:
    instants = list(schedule(500.0, 20_000, seed=3))

    assert instants == sorted(instants)
    assert math.isclose(instants[-1], 40.0, rel_tol=0.03)
    assert instants == list(schedule(500.0, 20_000, seed=3))
    assert read_arrivals("a 1.5 1.6\nb 2.5 2.75") == {"a": (1.5, 1.6), "b": (2.5, 2.75)}


def test_a_metrics_page_is_summed_over_labels_without_buckets() -> None:
    page = totals(
        "# TYPE emails_total counter\n"
        'emails_total{provider="smtp"} 3\nemails_total{provider="ses"} 4\n'
        "# TYPE batch histogram\n"
        'batch_bucket{le="1"} 1\nbatch_bucket{le="+Inf"} 2\nbatch_sum 30\nbatch_count 2\n'
    )

    assert page == {"emails_total": 7, "batch_sum": 30, "batch_count": 2}
    assert mean_of("batch", page, {"batch_sum": 130, "batch_count": 4}) == 50
    assert mean_of("batch", page, page) is None
