"""Reads our dashboard and our alert rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

DEPLOY: Final = Path(__file__).parent.parent.parent / "deploy"
RULES: Final = DEPLOY / "alerts.rules.yml"


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    return read


def queries() -> list[tuple[str, str]]:
    """The queries of all panels: title and expression, with a fixed interval instead of Grafana's variable."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "1m"))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]
