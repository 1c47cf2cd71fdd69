"""How long to wait before a process that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_WAIT_SECONDS: Final = 0.1
LONGEST_WAIT_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 10.0
"""A process that lived this long was well; its next end counts as the first."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """A role's recent ends.

    Attributes:
        in_a_row: Ends since the role was last steady.
    """

    in_a_row: int = 0

    def after(self, lived_seconds: float) -> Restarts:
        """The state after one more end."""
        return Restarts(1 if lived_seconds >= STEADY_SECONDS else self.in_a_row + 1)

    @property
    def wait_seconds(self) -> float:
        """The wait before the next start: none after the first end, then doubling."""
        if self.in_a_row <= 1:
            return 0.0
        return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(self.in_a_row - 2, 20))
