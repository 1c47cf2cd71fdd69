"""A JSON schema for our dashboard: the features that it uses, in the form that Grafana's importer requires."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

DEPLOY: Final = Path(__file__).parent.parent.parent / "deploy"
DASHBOARD: Final = DEPLOY / "grafana-dashboard.json"
RULES: Final = DEPLOY / "alerts.rules.yml"

_SOURCE: Final = {
    "type": "object",
    "required": ["type", "uid"],
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    "additionalProperties": False,
}


def _cells(least: int, most: int) -> dict[str, object]:
    return {"type": "integer", "minimum": least, "maximum": most}


_GRID: Final = {
    "type": "object",
    "required": ["h", "w", "x", "y"],
    "properties": {"h": _cells(1, 1000), "w": _cells(1, 24), "x": _cells(0, 23), "y": _cells(0, 1000)},
    "additionalProperties": False,
}
_TEXT: Final = {"type": "string", "minLength": 1}
_LETTER: Final = {"type": "string", "pattern": "^[A-Z]$"}
_WORDS: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_TARGET: Final = {
    "type": "object",
    "required": ["refId", "expr", "datasource", "legendFormat"],
    "properties": {"refId": _LETTER, "expr": _TEXT, "legendFormat": _WORDS, "datasource": _SOURCE}
    | {"instant": _FLAG, "range": _FLAG},
    "additionalProperties": False,
}
_CHART: Final = {
    "type": {"enum": ["stat", "timeseries"]},
    "datasource": _SOURCE,
    "targets": {"type": "array", "minItems": 1, "items": _TARGET},
    "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
}
_PANEL: Final = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {"id": {"type": "integer"}, "title": _TEXT, "gridPos": _GRID},
    "oneOf": [
        {"required": ["collapsed", "panels"], "properties": {"type": {"const": "row"}}},
        {"required": ["datasource", "targets", "fieldConfig", "options"], "properties": _CHART},
    ],
}
_VARIABLE: Final = {"properties": {"name": {"const": "datasource"}, "type": {"const": "datasource"}}}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "refresh"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "title": {"type": "string"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {"type": "array", "items": _PANEL},
        "templating": {"type": "object", "properties": {"list": {"type": "array", "contains": _VARIABLE}}},
    },
    "not": {"required": ["id"]},
}


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return read


def queries() -> list[tuple[str, str]]:
    """The queries of all panels: title and expression, with a fixed interval instead of Grafana's variable."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "1m"))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]
