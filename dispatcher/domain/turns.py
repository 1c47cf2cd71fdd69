"""Weighted turns: decides which of the waiting lanes, or of the waiting tenants, is served next. No I/O.

In this module, a *name* is the name of a lane or of a tenant. Each name has a clock, which advances by 1 / weight with
each email. The name with the earliest clock is next. So names that always wait are served in proportion to their
weights, and a name that needs less than its share is served at once. A name gets no credit for the time in which it did
not wait: its clock is set to the time of the last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Final

MAX_ABSENT: Final = 1000
"""The most clocks that are kept for names that do not wait now."""


class Turns:
    """Decides in which order the waiting lanes, or the waiting tenants, are served."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        """`weight_of` returns the weight, above 0, of a lane or tenant. The weight may change over time."""
        self._weight_of = weight_of
        self._clocks: dict[str, float] = {}
        self._now = 0.0

    def next(self, waiting: Iterable[str]) -> str:
        """The lane or tenant to serve next: of those with the earliest clock, the first. After it, call `charge`."""
        clocks = {name: max(self._clocks.get(name, 0.0), self._now) for name in waiting}
        name = min(clocks, key=clocks.__getitem__)
        self._now = clocks[name]
        if len(self._clocks) > len(clocks) + MAX_ABSENT:
            self._clocks = clocks
        return name

    def allot(self, waiting: Mapping[str, int], turns: int) -> list[str]:
        """Decides which lane or tenant gets each of at most `turns` turns; `waiting` is how many turns each needs now.
        Returns one name per turn, in order. Advances the clocks, as `charge` does. Takes logarithmic time per turn."""
        clocks = [
            (max(self._clocks.get(name, 0.0), self._now), at, name)
            for at, (name, wanted) in enumerate(waiting.items())
            if wanted > 0
        ]
        heapify(clocks)
        left = dict(waiting)
        order: list[str] = []
        while clocks and len(order) < turns:
            clock, at, name = clocks[0]
            # If only one name is left, it gets all remaining turns.
            count = 1 if len(clocks) > 1 else min(left[name], turns - len(order))
            order += [name] * count
            left[name] -= count
            step = 1 / self._weight_of(name)
            self._now = max(self._now, clock + (count - 1) * step)
            self._clocks[name] = later = clock + count * step
            if left[name]:
                heapreplace(clocks, (later, at, name))
            else:
                heappop(clocks)
        if len(self._clocks) > len(waiting) + MAX_ABSENT:
            self._clocks = {name: clock for name, clock in self._clocks.items() if clock > self._now}
        return order

    def charge(self, name: str, emails: int = 1) -> None:
        """Advances the clock of the lane or tenant with this name, because this many of its emails were served. A
        negative number sets the clock back, for turns from `allot` that were not used."""
        self._clocks[name] = max(self._clocks.get(name, 0.0), self._now) + emails / self._weight_of(name)
