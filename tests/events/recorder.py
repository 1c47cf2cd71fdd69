"""A sink of events that keeps them in a list, for tests of the code that receives and parses events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dispatcher.domain.event import ProviderEvent


@dataclass
class Recorder:
    """Keeps the events that are given to `store`.

    Attributes:
        batches: The events of each call.
        faults: Exceptions that the next calls raise, one per call.
    """

    batches: list[list[ProviderEvent]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)

    async def store(self, events: Sequence[ProviderEvent]) -> None:
        """Keeps events, or raises the next fault."""
        if self.faults:
            raise self.faults.pop(0)
        self.batches.append(list(events))
