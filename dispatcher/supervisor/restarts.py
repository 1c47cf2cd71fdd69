"""How long to wait before a process that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

LONGEST_WAIT_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 10.0
"""A process that lived this long was well; its next end counts as the first."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """A process's recent ends: those after it was up, or those before.

    Attributes:
        first_wait_seconds: The first wait; each further one is twice as long.
        free: How many ends cost no wait.
        in_a_row: Ends since it was last steady, or last up.
    """

    first_wait_seconds: float = 0.1
    free: int = 1
    in_a_row: int = 0

    def after(self, lived_seconds: float = 0.0) -> Restarts:
        """The state after one more end."""
        return replace(self, in_a_row=1 if lived_seconds >= STEADY_SECONDS else self.in_a_row + 1)

    @property
    def wait_seconds(self) -> float:
        """The wait before the next start."""
        doublings = self.in_a_row - 1 - self.free
        # The exponent is bounded, because a float is, however often a process ends.
        return 0.0 if doublings < 0 else min(self.first_wait_seconds * 2.0 ** min(doublings, 64), LONGEST_WAIT_SECONDS)


BOOTS: Final = Restarts(first_wait_seconds=0.5, free=0)
"""Of a process that never was up: what could not boot will hardly boot at once; a person has to mend something."""
