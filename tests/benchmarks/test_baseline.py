"""The work of this checkout takes no more instructions than its baseline, and the baseline says why it was moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import instruction_baseline as baseline
from benchmarks import instructions
from benchmarks.instructions import BACKEND, CLIENT

BUILD, ANOTHER = "Python 3.11, PostgreSQL 15", "Python 3.14, PostgreSQL 18"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "results" / "baseline.json"
    figures = {"lease 72": {CLIENT: 50_000.4, BACKEND: 100_000.0}, "idle second, relay": {CLIENT: 9_000.0}}
    baseline.write(BUILD, figures, "the first counts", file)
    return file


@pytest.mark.slow
def test_no_count_is_above_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert instructions.main(["--check"]) == 0, capsys.readouterr().err


def test_the_committed_baseline_says_why_its_counts_are_what_they_are() -> None:
    assert all(baseline.reasons())
    assert baseline.reasons()


@pytest.mark.parametrize(
    ("part", "counts"),
    [("lease 72", {CLIENT: 50_900.0, BACKEND: 80_000.0}), ("idle second, relay", {CLIENT: 11_500.0})],
    ids=["within two per cent", "an idle second may differ by more"],
)
def test_a_count_near_the_baseline_passes(part: str, counts: dict[str, float], file: Path) -> None:
    assert baseline.findings(BUILD, {part: counts}, file) == []


@pytest.mark.parametrize(
    ("build", "part", "counts", "words", "remedy"),
    [
        (BUILD, "lease 72", {CLIENT: 50_000.0, BACKEND: 103_000.0},
         "lease 72, PostgreSQL: +3.0%, from 100,000 to 103,000 instructions", "--write-baseline --reason"),
        (BUILD, "idle second, relay", {CLIENT: 12_000.0}, "idle second, relay, client: +33.3%", ""),
        (BUILD, "scrape", {CLIENT: 1.0}, "scrape, client: baseline.json has no count.", ""),
        (ANOTHER, "scrape", {CLIENT: 1.0}, f"no counts for this build: {ANOTHER}", "--write-baseline --reason"),
    ],
    ids=["above two per cent", "an idle second", "a part without a baseline", "a build without a baseline"],
)  # fmt: skip
def test_a_count_that_does_not_fit_is_named_with_the_way_to_accept_it(
    build: str, part: str, counts: dict[str, float], words: str, remedy: str, file: Path
) -> None:
    (finding,) = baseline.findings(build, {part: counts}, file)

    assert words in finding
    assert remedy in finding


def test_moving_some_counts_keeps_the_others_and_gives_the_new_reason(file: Path) -> None:
    baseline.write(BUILD, {"lease 72": {CLIENT: 60_000.0, BACKEND: 100_000.0}}, "leases have a deadline", file)

    assert (
        baseline.findings(BUILD, {"lease 72": {CLIENT: 60_000.0}, "idle second, relay": {CLIENT: 9_000.0}}, file) == []
    )
    assert baseline.reasons(file) == ["leases have a deadline"]


def test_the_baseline_is_not_moved_without_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert instructions.main(["--write-baseline"]) == 2
    assert "say why the counts changed" in capsys.readouterr().err
