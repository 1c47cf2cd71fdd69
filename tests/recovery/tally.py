"""Counts recovery's metrics in the test's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from dispatcher.telemetry import metrics
from dispatcher.telemetry.meters import Meter


class Tally:
    """One value of a metric, see `meters.SampleValue`."""

    def __init__(self, counts: Counter[tuple[str, ...]], name: str, *place: Any) -> None:
        """The last argument is the values of the labels."""
        self.counts = counts
        self.place = (name, *place[-1])

    def inc(self, amount: float) -> None:
        self.counts[self.place] += int(amount)

    def set(self, value: float) -> None:
        self.counts[self.place] = int(value)


_OF_RECOVERY: Final = {"rescued": metrics.RECOVERED, "held": metrics.HELD, "lease_lost": metrics.LEASES_LOST}


@contextmanager
def counted(meters: Mapping[str, Meter] = _OF_RECOVERY) -> Iterator[Counter[tuple[str, ...]]]:
    """Counts these meters by name and labels during the block. By default, counts recovered emails, held emails and
    lost leases."""
    counts: Counter[tuple[str, ...]] = Counter()
    for name, meter in meters.items():
        meter.bind(partial(Tally, counts, name))
    try:
        yield counts
    finally:
        for meter in meters.values():
            meter.bind(None)
