"""Weighted turns: decides which of the waiting lanes, or of the waiting tenants, is served next. No I/O.

In this module, a *name* is the name of a lane or of a tenant. Each name has a clock, which advances by 1 / weight with
each email. The name with the earliest clock is next. So names that always wait are served in proportion to their
weights, and a name that needs less than its share is served at once. A name gets no credit for the time in which it did
not wait: its clock is set to the time of the last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final

from dispatcher.domain.controls import LanePolicy
from dispatcher.domain.lanes import DEFAULT_LANES, NORMAL

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


URGENT_WEIGHT: Final = 50.0
NORMAL_WEIGHT: Final = 40.0
BULK_WEIGHT: Final = 10.0
URGENT_SHARE: Final = 0.2
"""While the most urgent lane has emails, it gets at least this share of the turns. So no weight of another lane can
starve the most urgent lane."""


class LaneWeights:
    """The weight of each lane. A weight that no operator has set depends on the lane's position in DISPATCHER_LANES.
    `lanes`: most urgent first."""

    def __init__(self, lanes: Sequence[str] = DEFAULT_LANES) -> None:
        self.lanes = tuple(lanes)
        self.update({})

    @property
    def urgent(self) -> str | None:
        """The most urgent lane; None if no lane is more urgent than `normal`."""
        return None if self.lanes[0] == NORMAL else self.lanes[0]

    def update(self, policies: Mapping[str, LanePolicy]) -> None:
        """Computes the weights again, from the policies that operators have set now, by lane."""
        normal_at = self.lanes.index(NORMAL)
        self._weights = {
            lane: policies[lane].weight
            if lane in policies
            else (URGENT_WEIGHT if at < normal_at else NORMAL_WEIGHT if at == normal_at else BULK_WEIGHT)
            for at, lane in enumerate(self.lanes)
        }
        if self.urgent is not None:
            others = sum(self._weights.values()) - self._weights[self.urgent]
            least = others * URGENT_SHARE / (1 - URGENT_SHARE)
            self._weights[self.urgent] = max(self._weights[self.urgent], least)

    def of(self, lane: str) -> float:
        """The weight of a lane, above 0. A lane that this host does not know has the default weight of `normal`."""
        return self._weights.get(lane, NORMAL_WEIGHT)
