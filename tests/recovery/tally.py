"""What recovery counts, in the test's own process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


@contextmanager
def counted() -> Iterator[Counter[tuple[str, ...]]]:
    """Counts rescued and held emails by reason, for the length of a block."""
    counts: Counter[tuple[str, ...]] = Counter()
    metrics.RESCUED.bind(lambda _, __, ___, values: Tally(counts, ("rescued", *values)))
    metrics.HELD.bind(lambda _, __, ___, values: Tally(counts, ("held", *values)))
    try:
        yield counts
    finally:
        metrics.RESCUED.bind(None)
        metrics.HELD.bind(None)
