"""Generated files are up to date with `./run generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispatcher.dev import generate
from dispatcher.telemetry.meters import Counter, Gauge, Histogram, Panel


@pytest.mark.parametrize("path", generate.generated(), ids=lambda path: path.name)
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text() == generate.generated()[path], "run: ./run generate"


def test_a_new_metric_gets_a_panel_in_its_row_and_moves_lower_rows_down() -> None:
    lines = Counter("dispatcher_log_lines_total", "Lines written.", ("provider",))
    metrics = [lines, Histogram("dispatcher_log_seconds", "One line.", (1,)), Gauge("dispatcher_log_files", "Files.")]
    for meter in metrics:
        meter.panel = Panel.SENDING
    page = json.dumps({"panels": [panel(1, "row", Panel.SENDING, 0), panel(2, "timeseries", "Emails", 1),
                                  panel(3, "row", Panel.HOSTS, 9), panel(4, "timeseries", "Workers", 10)]})  # fmt: skip

    text = generate._with_panels(page, "", metrics)

    places = [(one["title"], one["gridPos"]["x"], one["gridPos"]["y"]) for one in json.loads(text)["panels"]]
    assert places == [
        *(("Sending", 0, 0), ("Emails", 0, 1), ("Log lines per second", 8, 1), ("Log seconds", 16, 1)),
        *(("Log files", 0, 9), ("Hosts", 0, 17), ("Workers", 0, 18)),
    ]
    assert generate._with_panels(text, "", metrics) == text


def panel(number: int, kind: str, title: str, y: int) -> dict[str, object]:
    return {"id": number, "type": kind, "title": title, "gridPos": {"x": 0, "y": y, "w": 8, "h": 8}}
