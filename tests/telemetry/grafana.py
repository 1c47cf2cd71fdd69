"""Reads our dashboard and our alert rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

DEPLOY: Final = Path(__file__).parent.parent.parent / "deploy"
RULES: Final = DEPLOY / "alerts.rules.yml"


def queries() -> list[tuple[str, str]]:
    """The queries of all panels: title and expression, with a fixed interval instead of Grafana's variable."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "1m"))
        for panel in json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
        for target in panel.get("targets", [])
    ]
