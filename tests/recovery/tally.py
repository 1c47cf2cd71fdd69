"""Counts recovery's metrics in the test's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dispatcher.telemetry import metrics
from dispatcher.telemetry.meters import Meter


@dataclass
class Tally:
    """One value of a metric."""

    counts: Counter[tuple[str, ...]]
    place: tuple[str, ...]

    def inc(self, amount: float) -> None:
        self.counts[self.place] += int(amount)

    def set(self, value: float) -> None:
        self.counts[self.place] = int(value)


def _value(counts: Counter[tuple[str, ...]], name: str, *place: Any) -> Tally:
    return Tally(counts, (name, *place[-1]))


_OF_RECOVERY: Final = {"rescued": metrics.RECOVERED, "held": metrics.HELD, "lease_lost": metrics.LEASES_LOST}


@contextmanager
def counted(meters: Mapping[str, Meter] = _OF_RECOVERY) -> Iterator[Counter[tuple[str, ...]]]:
    """Counts these meters by name and labels during the block. By default, counts recovered emails, held emails and
    lost leases."""
    counts: Counter[tuple[str, ...]] = Counter()
    for name, meter in meters.items():
        meter.bind(partial(_value, counts, name))
    try:
        yield counts
    finally:
        for meter in meters.values():
            meter.bind(None)
