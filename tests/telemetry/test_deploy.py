"""The dashboard and the alert rules in deploy/ use only metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

from dispatcher.monitor import server_gauges
from dispatcher.telemetry import scrape
from dispatcher.telemetry.meters import Histogram, Meter

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
RULES: Final = DEPLOY / "alerts.rules.yml"


def queries() -> list[str]:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    return [target["expr"].replace("$__rate_interval", "1m") for each in panels for target in each.get("targets", [])]


def series() -> dict[str, set[str]]:
    found = {sample: set(labels) for meter in Meter.declared for sample, labels in meter.samples.items()}
    found |= {f"{meter.name}_count": set(meter.labels) for meter in Meter.declared if isinstance(meter, Histogram)}
    found |= {reading.name: set(reading.labels) for reading in server_gauges.SERVER_GAUGES}
    return found | {scrape.SKIPPED[0]: {"reason"}}


def rules() -> list[dict[str, Any]]:
    read = yaml.safe_load(RULES.read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    return queries() + [rule["expr"] for rule in rules()]


def named(expression: str) -> set[str]:
    return set(re.findall(r"\bdispatcher_\w+", expression))


def test_every_queried_metric_exists() -> None:
    unknown = {name for expression in expressions() for name in named(expression)} - series().keys()

    assert unknown == set()
    assert all(named(expression) for expression in expressions())


def test_queried_labels_exist() -> None:
    for expression in expressions():
        asked = {
            label
            for words in re.findall(r"\bby \(([\w, ]+)\)", expression) + re.findall(r"\{([^}]*)\}", expression)
            for label in re.findall(r"(?:^|,)\s*(\w+)", words)
        }
        assert asked <= set().union({"instance"}, *(series()[name] for name in named(expression))), expression


def test_every_metric_is_on_the_dashboard_or_an_alert() -> None:
    shown = {name for expression in expressions() for name in named(expression)}
    meters = {each.name for each in Meter.declared} | {each.name for each in server_gauges.SERVER_GAUGES}

    assert {name for name in meters if not any(one.startswith(name) for one in shown)} == set()


def test_every_alert_has_a_severity_and_a_summary() -> None:
    assert [rule["alert"] for rule in rules() if rule["labels"]["severity"] not in ("critical", "warning")] == []
    assert [rule["alert"] for rule in rules() if not rule["annotations"]["summary"]] == []
    assert len({rule["alert"] for rule in rules()}) == len(rules())
