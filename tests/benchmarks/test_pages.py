"""README.md and docs/performance.md quote only figures that are in benchmarks/results/."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import measure, pages
from benchmarks.idle import Cost

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


def test_every_kind_of_figures_is_on_a_page() -> None:
    quoted = {found[1] for page in pages.PAGES for found in pages.BLOCK.finditer(page.read_text())}

    assert quoted == pages.BLOCKS.keys()


def test_a_page_follows_new_results(tmp_path: Path) -> None:
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule" / "printed.txt").write_text("commit 1234567\np99 31 ms\n")

    page = pages.written("<!-- figures: printed -->\nold\n<!-- end of figures -->\n", tmp_path)

    assert page == "<!-- figures: printed -->\n```\ncommit 1234567\np99 31 ms\n```\n<!-- end of figures -->\n"


def test_an_idle_host_has_a_row_for_each_rate_and_a_sum_of_its_processes(tmp_path: Path) -> None:
    machine = {"commit": "1234567"}
    costs = [Cost(None, {"postgresql": 0.5}, {}, 0.0), Cost(10.0, {"relay": 2.0, "postgresql": 1.25}, {}, 8.0)]
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle" / "idle.jsonl").write_text(
        "".join(json.dumps({**asdict(cost), "machine": machine}) + "\n" for cost in costs)
    )

    rows = pages.idle(tmp_path).splitlines()[2:]

    assert rows == ["| no dispatcher | 0.5 | 0.0 | 0.5 | 0.0 |", "| 10 | 1.2 | 2.0 | 3.2 | 8.0 |"]


def test_a_block_that_no_results_fill_is_reported() -> None:
    with pytest.raises(ValueError, match="no figures have the name 'guesses'"):
        pages.written("<!-- figures: guesses -->\n<!-- end of figures -->\n")


def test_results_without_a_case_of_the_page_are_reported(tmp_path: Path) -> None:
    shutil.copytree(pages.RESULTS / "bundles", tmp_path / "bundles")

    with pytest.raises(ValueError, match=r"bundles has 0 cases with .*17.*: measure the folder again"):
        pages.case_of(tmp_path, "bundles", settings=("17", "256"))


def test_the_commit_of_a_part_is_that_of_its_figures(tmp_path: Path) -> None:
    (tmp_path / "printed.txt").write_text("commit 1234567\n$ benchmarks/schedule.py\n")

    assert measure.measured_at(tmp_path) == "1234567"
    assert measure.measured_at(pages.RESULTS / "floor") is not None
    assert measure.measured_at(tmp_path / "not measured") is None


def test_the_parts_fill_every_folder_that_the_pages_read() -> None:
    read = {folder for _, folder, _ in pages.RATES} | set(pages.FLOORS.values()) | {"latency", "peers", "idle"}

    assert read <= measure.PARTS.keys()


def test_a_part_that_fails_keeps_its_earlier_figures(tmp_path: Path) -> None:
    assert measure.take(measure.Part("machine.py", 1, has_folder=False), tmp_path / "part", "1234567")
    assert not measure.take(measure.Part("no such program", 1, has_folder=False), tmp_path / "part", "7654321")

    assert measure.measured_at(tmp_path / "part") == "1234567"
    assert [each.name for each in tmp_path.iterdir()] == ["part"]
