"""The metrics of all processes on this host: prometheus-client merges the files that `metric_files` writes.

Invalid files are skipped and counted; they never make a scrape fail.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from dispatcher.telemetry import metric_files
from dispatcher.telemetry.meters import Labels, Meter

SKIPPED: Final = (
    "dispatcher_metrics_skipped_files",
    "Metric files that /metrics leaves out because they are empty, corrupt, unreadable, or not ours (foreign).",
)
SKIP_REASONS: Final = ("empty", "corrupt", "foreign", "unreadable")
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def page(folder: Path) -> bytes:
    """The metrics of this host's processes, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(ProcessCollector(folder))
    return generate_latest(registry)


class ProcessCollector(Collector):
    """Collects the metrics of all processes, for a registry of prometheus-client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterable[Metric]:
        """Returns nothing. Without this method, the registry would call `collect` to find the names of the metrics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric in the files, and the number of skipped files."""
        merged, skipped = self._merged()
        for metric in merged:
            metric.name = metric.name.removesuffix("_total")  # `generate_latest` appends _total to a counter's name
            yield metric
        family = GaugeMetricFamily(*SKIPPED, labels=("reason",))
        for reason in SKIP_REASONS:
            family.add_metric((reason,), skipped[reason])
        yield family

    def values_of(self, meter: Meter) -> dict[Labels, float]:
        """The sums of a counter or gauge over all processes, by label values."""
        return {
            tuple(sample.labels[label] for label in meter.labels): sample.value
            for metric in self._merged()[0]
            for sample in metric.samples
            if metric.name == meter.name
        }

    def _merged(self) -> tuple[list[Metric], Tally[str]]:
        good: list[str] = []
        skipped: Tally[str] = Tally()
        for path in self._paths():
            try:
                if metric_files.is_current(path):
                    metric_files.read(path)
                    good.append(str(path))
            except FileNotFoundError:
                continue
            except metric_files.BadFile as bad:
                skipped[bad.reason] += 1
        try:
            return list(MultiProcessCollector.merge(good)), skipped
        except FileNotFoundError:  # the parent restarted and deleted the files
            return [], skipped

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.suffix == ".db")
        except OSError:
            # The folder does not exist. The next process that starts creates it.
            return []
