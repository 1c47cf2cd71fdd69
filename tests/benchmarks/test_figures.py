"""The statistics of the benchmarks, the baseline of instructions, and the figures that the README and the page about
performance quote from benchmarks/results/."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from benchmarks import cpu, instructions, measure, pages
from benchmarks import instruction_baseline as baseline
from benchmarks.cpu import Seen
from benchmarks.figures import latencies_ms, percentile
from benchmarks.instructions import BACKEND, CLIENT
from benchmarks.trends import Tolerance, Verdict, trend


@pytest.mark.parametrize(("share", "expected"), [(50, 50), (99, 99), (100, 100), (0.1, 1)])
def test_a_percentile_is_the_smallest_figure_with_that_share_at_or_below_it(share: float, expected: int) -> None:
    assert percentile(range(1, 101), share) == expected


def test_latency_ends_at_the_first_acceptance_and_omits_emails_without_one() -> None:
    began = {"a": 10.0, "b": 10.0, "never": 10.0}

    assert latencies_ms(began, {"a": [10.5, 12.0], "b": [10.25]}) == [250.0, 500.0]


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


@pytest.mark.slow  # counts instructions under valgrind for minutes
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


README, PERFORMANCE = pages.PAGES
SECTIONS = {
    README: ("## How fast", "## Run it for real"),
    PERFORMANCE: ("## Current results", "## Earlier measurements"),
}
"""Where a page has current figures: from one heading to another."""
FIGURE = re.compile(r"\d ?(emails/s|emails per second|µs|ms|MB|kB|times)\b")


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_page_quotes_the_figures_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert pages.written(text) == text, "run: .venv/bin/python benchmarks/pages.py"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_page_has_no_current_figure_outside_the_blocks_that_the_results_fill(page: Path) -> None:
    first, last = SECTIONS[page]
    section = page.read_text().partition(first)[2].partition(last)[0]
    assert section

    outside = pages.BLOCK.sub("", section).splitlines()

    assert [line for line in outside if FIGURE.search(line) or re.match(r"\|.*\d", line)] == []


def test_the_parts_fill_every_folder_that_the_pages_read() -> None:
    read = {folder for _, folder, _ in pages.RATES} | set(pages.FLOORS.values()) | {"latency", "peers", "idle"}

    assert read <= measure.PARTS.keys()
