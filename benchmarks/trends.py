"""Judges whether a series of measurements stays constant, from a robust line through the series.

The line is the Theil-Sen estimator: the median of the slopes between all pairs of points. Outliers do not change the
line if they are at most a quarter of the points. The line's interval is Kendall's, at 95 %. Successive samples are
similar, so the real interval is wider than the computed one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_POINTS: Final = 400
"""If there are more points, only some are used: computing the slopes between all pairs of thousands of points takes
minutes."""


class Verdict(StrEnum):
    """The verdict on a series."""

    FLAT = "flat"
    GROWS = "grows"
    FALLS = "falls"
    NOISY = "noisy"
    """The slope exceeds its tolerance, but its interval includes zero."""
    UNKNOWN = "unknown"
    """Too few points for a verdict."""


@dataclass(frozen=True, slots=True)
class Trend:
    """The trend of a series after its settling time.

    Attributes:
        median: The median of the series' values.
        per_hour: The slope of the line.
        lowest: The lower end of the interval of the slope; `highest` is the upper end.
        tolerance: The largest slope per hour, up or down, that counts as flat.
    """

    name: str
    median: float
    per_hour: float
    lowest: float
    highest: float
    tolerance: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much a series may change in an hour: the larger of an amount and a share of its median.

    Attributes:
        settles: The share of the run after which the series should be constant. Series that grow into a working set
            take up to half of the run. A longer line is less affected by changes of the machine.
    """

    amount: float
    share: float = 0.0
    settles: float = 0.5

    def of(self, median: float) -> float:
        """The tolerance in the series' own unit."""
        return max(self.amount, self.share * abs(median))


def trend(name: str, instants: Sequence[float], values: Sequence[float], tolerance: Tolerance) -> Trend:
    """The trend of a series after its settling time.

    Args:
        instants: Seconds, ascending.
    """
    begin = instants[0] + (instants[-1] - instants[0]) * tolerance.settles if instants else 0.0
    points = [(at / 3600, value) for at, value in zip(instants, values, strict=True) if at >= begin]
    points = points[:: math.ceil(len(points) / MAX_POINTS) or 1]
    median = statistics.median(value for _, value in points) if points else math.nan
    allowed = tolerance.of(median) if points else tolerance.amount
    if len(points) < 8:
        return Trend(name, median, math.nan, math.nan, math.nan, allowed, Verdict.UNKNOWN)
    slope, lowest, highest = _line(points)
    return Trend(name, median, slope, lowest, highest, allowed, _verdict(slope, lowest, highest, allowed))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    )
    count = len(points)
    spread = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, int((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
    return statistics.median(slopes), slopes[low], slopes[high]


def _verdict(slope: float, lowest: float, highest: float, allowed: float) -> Verdict:
    if abs(slope) <= allowed:
        return Verdict.FLAT
    if lowest <= 0 <= highest:
        return Verdict.NOISY
    return Verdict.GROWS if slope > 0 else Verdict.FALLS
