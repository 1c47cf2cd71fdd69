"""Statistics of raw measurements: percentiles, medians with their range, shares. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

PERCENTILES: Final = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """The lowest value, the median and the highest value of one figure over the repetitions of a case."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, figures: Iterable[float]) -> Spread:
        """The spread of these figures. There must be at least one figure."""
        known = list(figures)
        return cls(statistics.median(known), min(known), max(known))

    @property
    def noise(self) -> float:
        """The range as a share of the median."""
        return (self.highest - self.lowest) / self.median if self.median else 0.0

    def overlaps(self, other: Spread) -> bool:
        """Whether the ranges overlap, so that the difference may be noise."""
        return self.lowest <= other.highest and other.lowest <= self.highest


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest figure that is at least as large as `share` percent (0 to 100) of the figures (nearest rank).

    Args:
        ordered: The figures, ascending.
    """
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def latencies_ms(began_at: Mapping[str, float], ended_at: Mapping[str, Sequence[float]]) -> list[float]:
    """Sorted milliseconds from each email's start to its first acceptance; emails without acceptance are left out."""
    return sorted((ended_at[name][0] - began) * 1000 for name, began in began_at.items() if name in ended_at)


def per_email_us(before: Mapping[str, float], after: Mapping[str, float], emails: int) -> dict[str, float]:
    """CPU microseconds per email and process, from two readings of CPU seconds."""
    return {name: (seconds - before.get(name, 0.0)) / emails * 1e6 for name, seconds in after.items()}


def ideal_rate(rates_by_workers: Mapping[int, float], workers: int) -> float:
    """The rate of this many workers if each worker were as fast as the workers of the case with the fewest workers."""
    fewest = min(rates_by_workers)
    return rates_by_workers[fewest] / fewest * workers


def machine_rate(cores: int, cpu_us_per_email: float) -> float:
    """The rate at which all cores are fully used, given the CPU per email over all processes."""
    return cores * 1e6 / cpu_us_per_email if cpu_us_per_email else 0.0
