"""The files that follow from declarations are as `./run generate` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispatcher.dev import generate
from dispatcher.telemetry.meters import Counter, Gauge, Histogram, Meter, Panel


@pytest.mark.parametrize("path", generate.generated(), ids=lambda path: path.name)
def test_a_file_is_as_generate_writes_it(path: Path) -> None:
    assert path.read_text() == generate.generated()[path], "run: ./run generate"


def test_a_metric_gets_a_panel_in_its_row_and_moves_what_is_below() -> None:
    metrics: list[Meter] = [
        Counter("dispatcher_log_lines_total", "Lines written.", ("provider",), panel=None),
        Histogram("dispatcher_log_seconds", "One line.", (1,)),
        Gauge("dispatcher_log_files", "Open files."),
    ]
    for meter in metrics:
        meter.panel = Panel.SENDING
    before = json.loads(generate.DASHBOARD.read_text())["panels"]

    text = generate._with_panels(generate.DASHBOARD.read_text(), "", metrics)

    after = json.loads(text)["panels"]
    new = after[17 - 1 : 20 - 1]
    assert [one["title"] for one in new] == ["Log lines per second", "Log seconds", "Log files"]
    assert [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in new] == [(0, 22), (8, 22), (16, 22)]
    assert [one["gridPos"]["y"] - old["gridPos"]["y"] for one, old in zip(after[19:], before[16:], strict=True)] == [
        8
    ] * len(before[16:])
    assert generate._with_panels(text, "", metrics) == text
