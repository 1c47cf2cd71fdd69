"""The metrics of all processes on this host: the sums of the values in the files that `metric_files` writes.

Invalid files are skipped and counted; they never make a scrape fail.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
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
        """Every metric, and how many files were skipped, by reason."""
        sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        skipped: Tally[str] = Tally()
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.suffix == ".db")
        except OSError:  # the folder does not exist: the next process that starts creates it
            paths = []
        for path in paths:
            try:
                found = metric_files.read(path) if metric_files.is_current(path) else []
            except FileNotFoundError:  # the parent restarted and deleted the files
                continue
            except metric_files.BadFile as bad:
                skipped[bad.reason] += 1
                continue
            kind = metric_files.kind_of(path)
            for key, value in found:
                sums[kind, key] += value
        return _metrics_of(sums), skipped


def _metrics_of(sums: Mapping[tuple[str, str], float]) -> list[Metric]:
    """The metrics for the sums of values. Keys that differ only in the description are added up: API processes also
    have keys of earlier releases. Buckets are cumulative, as Prometheus expects."""
    metrics: dict[str, Metric] = {}
    series: defaultdict[tuple[Any, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (kind, text), value in sums.items():
        metric, sample, labels, bound, about = metric_files.key_of(kind, text)
        if metric not in metrics:
            metrics[metric] = Metric(metric, about, kind)
        series[metric, sample, labels][bound] += value
    for (metric, sample, labels), values in series.items():
        add, named, count = metrics[metric].add_sample, dict(labels), 0.0
        if "" in values:
            add(sample, named, values[""])
            continue
        for bound in sorted(values, key=float):
            count += values[bound]
            add(sample, {**named, "le": bound}, count)
        add(f"{metric}_count", named, count)
    return list(metrics.values())
