"""One picture of what all processes of the host have counted: the files of `metric_files`, summed.

A file that cannot be believed is left out and counted; a scrape never fails for it.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dispatcher.telemetry.meters import Counter, Gauge, Histogram, Labels, Meter, bound_text
from dispatcher.telemetry.metric_files import MetricFile, is_alive
from dispatcher.telemetry.metric_reading import BadFile, Key, read
from dispatcher.telemetry.metrics import METERS

SKIPPED: Final = (
    "dispatcher_metrics_skipped_files",
    "Files in the metrics folder that are left out: empty, corrupt, foreign or unreadable.",
)
SKIP_REASONS: Final = ("empty", "corrupt", "foreign", "unreadable")


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def page(folder: Path) -> bytes:
    """What this host's processes have counted, as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(ProcessCollector(folder))
    return generate_latest(registry)


class ProcessCollector(Collector):
    """Collects what processes have counted, for a registry of the library's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not scrape to learn our names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every meter that somebody has counted with, and how many files were left out."""
        sums, skipped = self._sums()
        yield from _families(sums)
        yield _skipped_family(skipped)

    def values_of(self, meter: Meter) -> dict[Labels, float]:
        """A counter's or gauge's sums over all processes, by label values."""
        return {key.values: value for key, value in self._sums()[0].items() if key.meter is meter}

    def _sums(self) -> tuple[dict[Key, float], Tally[str]]:
        sums: dict[Key, float] = defaultdict(float)
        skipped: Tally[str] = Tally()
        for path in self._paths():
            try:
                for key, value in _values(path, self._folder):
                    sums[key] += value
            except FileNotFoundError:
                continue
            except BadFile as bad:
                skipped[bad.reason] += 1
        return sums, skipped

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self._folder.iterdir() if path.suffix == ".db")
        except OSError:
            # Removed, or not made yet: the next process that begins makes it anew.
            return []


def _values(path: Path, folder: Path) -> list[tuple[Key, float]]:
    """What counts of a file: all of it, or nothing of a gauge whose process has ended."""
    file = MetricFile.of(path)
    if file is None:
        raise BadFile("foreign")
    kind = file.prefix.partition("_")[0]
    if kind == Gauge.kind and not is_alive(folder, file.name):
        return []
    return read(path, kind)


def _families(sums: dict[Key, float]) -> Iterator[Metric]:
    by_meter: dict[Meter, dict[tuple[str, Labels], float]] = defaultdict(dict)
    for key, value in sums.items():
        by_meter[key.meter][key.sample, key.values] = value
    for meter in METERS:
        if found := by_meter.get(meter):
            yield _family(meter, found)


def _family(meter: Meter, found: dict[tuple[str, Labels], float]) -> Metric:
    if isinstance(meter, Histogram):
        return _histogram(meter, found)
    family: CounterMetricFamily | GaugeMetricFamily = (
        CounterMetricFamily(meter.name, meter.about, labels=meter.labels)
        if isinstance(meter, Counter)
        else GaugeMetricFamily(meter.name, meter.about, labels=meter.labels)
    )
    for (_, labels), value in sorted(found.items()):
        family.add_metric(labels, value)
    return family


def _histogram(meter: Histogram, found: dict[tuple[str, Labels], float]) -> Metric:
    """The buckets as Prometheus wants them: each with all that are below it."""
    family = HistogramMetricFamily(meter.name, meter.about, labels=meter.labels)
    for (sample, labels), total in sorted(found.items()):
        if sample.endswith("_sum"):
            texts = [bound_text(bound) for bound in meter.bounds]
            counts = accumulate(found.get((f"{meter.name}_bucket", (*labels, text)), 0.0) for text in texts)
            family.add_metric(labels, list(zip(texts, counts, strict=True)), total)
    return family


def _skipped_family(skipped: Tally[str]) -> Metric:
    family = GaugeMetricFamily(*SKIPPED, labels=("reason",))
    for reason in SKIP_REASONS:
        family.add_metric((reason,), skipped[reason])
    return family
