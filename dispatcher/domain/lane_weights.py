"""The weights of the lanes, as this process last read them from PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dispatcher.domain.controls import LanePolicy
from dispatcher.domain.lanes import DEFAULT_LANES, NORMAL

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
