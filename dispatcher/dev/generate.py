"""`./run generate`: updates these files, so that they agree with the settings and metrics that the code declares.

deploy/dispatcher.env            every setting, explained
docs/metrics.md                  the table of metrics
deploy/grafana-dashboard.json    a new panel for each metric that no panel and no alert rule uses

The command never changes an existing panel, so you may edit panels by hand.
"""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from dispatcher.config.example import environment_file
from dispatcher.telemetry import metrics
from dispatcher.telemetry.meters import Counter, Gauge, Meter

ROOT: Final = Path(__file__).parent.parent.parent
ENVIRONMENT: Final = ROOT / "deploy" / "dispatcher.env"
TABLE: Final = ROOT / "docs" / "metrics.md"
DASHBOARD: Final = ROOT / "deploy" / "grafana-dashboard.json"
RULES: Final = ROOT / "deploy" / "alerts.rules.yml"

_HEIGHT: Final = 8
_WIDTH: Final = 8
_PANELS_PER_LINE: Final = 3
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_HEAD: Final = "| metric | kind | labels | what it counts |\n|---|---|---|---|\n"


def generated() -> dict[Path, str]:
    """The text that each file should have, by path."""
    text = environment_file()  # this call imports every built-in provider, and so declares its metrics
    return {
        ENVIRONMENT: text.rstrip() + "\n",
        TABLE: _with_table(TABLE.read_text(), Meter.declared),
        DASHBOARD: _with_panels(DASHBOARD.read_text(), RULES.read_text(), Meter.declared),
    }


def _with_table(page: str, meters: list[Meter]) -> str:
    before, head, rest = page.partition(_HEAD)
    rows = "".join(takewhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True)))
    assert head, f"{TABLE} does not have the table's heading"
    return before + head + "".join(map(_row, meters)) + rest.removeprefix(rows)


def _row(meter: Meter) -> str:
    labels = ", ".join(f"`{label}`" for label in meter.labels) or "\u2013"
    return f"| `{meter.name}` | {meter.kind} | {labels} | {meter.about} |\n"


def _with_panels(dashboard: str, rules: str, meters: list[Meter]) -> str:
    document = json.loads(dashboard)
    for meter in meters:
        if not re.search(rf"\b{meter.name}(_bucket|_sum|_count)?\b", dashboard + rules):
            _add(document["panels"], meter)
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _add(panels: list[dict[str, Any]], meter: Meter) -> None:
    """Adds a panel at the end of the metric's dashboard row. If it begins a new line of panels, moves all later rows
    down."""
    at = next(number for number, one in enumerate(panels) if (one["type"], one["title"]) == ("row", meter.panel))
    row = list(takewhile(lambda one: one["type"] != "row", panels[at + 1 :]))
    y = max((one["gridPos"]["y"] for one in row), default=panels[at]["gridPos"]["y"] + 1)
    place = sum(one["gridPos"]["y"] == y for one in row)
    following = panels[at + 1 + len(row) :]
    if place == _PANELS_PER_LINE:
        y, place = y + _HEIGHT, 0
    if place == 0:
        for one in following:
            one["gridPos"]["y"] += _HEIGHT
    panels[at + 1 + len(row) :] = [
        _panel(meter, max(one["id"] for one in panels) + 1, place * _WIDTH, y),
        *following,
    ]


def _panel(meter: Meter, number: int, x: int, y: int) -> dict[str, Any]:
    title = meter.name.removeprefix("dispatcher_").removesuffix("_total").replace("_", " ").capitalize()
    return {
        "id": number,
        "type": "timeseries",
        "title": f"{title} per second" if isinstance(meter, Counter) else title,
        "description": meter.about,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {
                "unit": "s" if meter.name.endswith("_seconds") else "short",
                "min": 0,
                "custom": {"fillOpacity": 10, "stacking": {"mode": "none"}},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": letter, "datasource": _SOURCE, "expr": expression, "legendFormat": legend, "range": True}
            for letter, (expression, legend) in zip("AB", _queries(meter), strict=False)
        ],
    }


def _queries(meter: Meter) -> list[tuple[str, str]]:
    """The PromQL expressions of the lines in a metric's panel, each with its legend."""
    labels = ("instance", *meter.labels) if isinstance(meter, Gauge) else meter.labels
    by = f" by ({', '.join(labels)})" if labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels) or meter.name
    if isinstance(meter, Counter):
        return [(f"sum{by} (rate({meter.name}[$__rate_interval]))", legend)]
    if isinstance(meter, Gauge):
        return [(f"sum{by} ({meter.name})", legend)]
    buckets = f"sum by ({', '.join(('le', *meter.labels))}) (rate({meter.name}_bucket[$__rate_interval]))"
    shares = ((0.5, "median"), (0.99, "99 of 100"))
    return [(f"histogram_quantile({share}, {buckets})", f"{legend} {word}") for share, word in shares]


def main() -> None:
    """Writes each file whose text has to change, and prints its path, or that nothing changed."""
    assert metrics.EMAILS in Meter.declared  # the import of `metrics` has declared the metrics
    changed = {path: text for path, text in generated().items() if path.read_text() != text}
    for path, text in changed.items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    if not changed:
        print("Everything is up to date.")


if __name__ == "__main__":
    main()
