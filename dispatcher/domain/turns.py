"""Weighted turns: who is served next, among those that wait. For lanes and for tenants. No I/O.

Each name has a clock, which advances by 1 / weight with each email. The name whose clock is furthest behind is next. So
names that always wait are served in proportion to their weights, and a name that needs less than its share is served
at once. A name that did not wait gets no credit for that time: its clock is set to the time of the last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Final

MAX_ABSENT: Final = 1000
"""The most clocks that are kept of names that do not wait."""


class Turns:
    """The turns of one queue for which several names wait."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        """
        Args:
            weight_of: The weight of a name, above 0. It may change over time.
        """
        self._weight_of = weight_of
        self._clocks: dict[str, float] = {}
        self._now = 0.0

    def next(self, waiting: Iterable[str]) -> str:
        """The name that is served next. Call `charge` after it was served.

        Args:
            waiting: All names that wait now, at least one. Of equal clocks, the first name is next.
        """
        clocks = {name: max(self._clocks.get(name, 0.0), self._now) for name in waiting}
        name = min(clocks, key=clocks.__getitem__)
        self._now = clocks[name]
        if len(self._clocks) > len(clocks) + MAX_ABSENT:
            self._clocks = clocks
        return name

    def allot(self, waiting: Mapping[str, int], turns: int) -> list[str]:
        """The next turns, in order, and charges them. Takes a logarithmic time per turn, even for thousands of names.

        Args:
            waiting: The most turns that each name needs now.
            turns: The most turns of all names.
        """
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
            count = 1 if len(clocks) > 1 else min(left[name], turns - len(order))  # a name alone gets all turns
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
        """Notes that a name was served. A negative number gives unused turns of `allot` back."""
        self._clocks[name] = max(self._clocks.get(name, 0.0), self._now) + emails / self._weight_of(name)
