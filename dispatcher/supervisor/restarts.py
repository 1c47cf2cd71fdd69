"""How long to wait before an ended process is restarted."""

from __future__ import annotations

from typing import Final

from dispatcher.domain.values import dataclass, replace

LONGEST_WAIT_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 10.0
"""A process that ran for this long was healthy, so its next end counts as the first end in a row."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """Counts how often a process has ended since it was last healthy, or in its boot; calculates the wait before its
    next start.

    The first `free` ends are followed by a restart without a wait. The wait then doubles with each further end.
    """

    first_wait_seconds: float = 0.1
    free: int = 1
    in_a_row: int = 0

    def after(self, lived_seconds: float = 0.0) -> Restarts:
        """The count after one more end. If the process ran long enough to be healthy, counts from 1 again."""
        return replace(self, in_a_row=1 if lived_seconds >= STEADY_SECONDS else self.in_a_row + 1)

    @property
    def wait_seconds(self) -> float:
        doublings = self.in_a_row - 1 - self.free
        # Bound the exponent, so that the float cannot overflow.
        return 0.0 if doublings < 0 else min(self.first_wait_seconds * 2.0 ** min(doublings, 64), LONGEST_WAIT_SECONDS)


BOOTS: Final = Restarts(first_wait_seconds=0.5, free=0)
"""The count for a process that was never up. An immediate restart would hardly help: an operator has to fix
something."""
