"""What recovery counts, in the test's own process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dispatcher.telemetry import metrics


@dataclass
class Tally:
    """A cell per metric and reason."""

    counts: Counter[tuple[str, ...]]
    place: tuple[str, ...]

    def inc(self, amount: float) -> None:
        """See `meters.Cell`."""
        self.counts[self.place] += int(amount)

    def set(self, value: float) -> None:
        """See `meters.Cell`."""
        raise NotImplementedError


def _cell(counts: Counter[tuple[str, ...]], name: str, *place: Any) -> Tally:
    """A metric's cell for the label values that come last."""
    return Tally(counts, (name, *place[-1]))


_METRICS: Final = {"rescued": metrics.RESCUED, "held": metrics.HELD, "lease_lost": metrics.LEASES_LOST}


@contextmanager
def counted() -> Iterator[Counter[tuple[str, ...]]]:
    """Counts rescued and held emails by reason, and lost leases, for the length of a block."""
    counts: Counter[tuple[str, ...]] = Counter()
    for name, metric in _METRICS.items():
        metric.bind(partial(_cell, counts, name))
    try:
        yield counts
    finally:
        for metric in _METRICS.values():
            metric.bind(None)
