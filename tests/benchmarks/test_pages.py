"""README.md and docs/performance.md quote only figures that are in benchmarks/results/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import measure, pages

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
