"""Reads scrapes as dictionaries of sample values. A key is the sample's name with its labels."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from dispatcher.telemetry.scrape import ProcessCollector

SENT = 'dispatcher_emails_total{outcome="accepted",provider="smtp"}'
IN_FLIGHT = "dispatcher_in_flight_emails"


def samples(folder: Path) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(ProcessCollector(folder))
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> dict[str, float]:
    """The samples in Prometheus' text format."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def skipped(folder: Path) -> dict[str, float]:
    """The number of skipped files by reason, without zeros."""
    prefix = 'dispatcher_metrics_skipped_files{reason="'
    found = {name: value for name, value in samples(folder).items() if name.startswith(prefix)}
    assert len(found) == 4
    return {name.removeprefix(prefix).removesuffix('"}'): value for name, value in found.items() if value}
