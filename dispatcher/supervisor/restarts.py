"""How long to wait before a process that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_WAIT_SECONDS: Final = 0.1
LONGEST_WAIT_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 10.0
"""A process that lived this long was well; its next end counts as the first."""
FIRST_BOOT_WAIT_SECONDS: Final = 0.5
"""What could not boot will hardly boot at once; a person has to mend something."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """A process's recent ends after it was up.

    Attributes:
        in_a_row: Ends since it was last steady.
    """

    in_a_row: int = 0

    def after(self, lived_seconds: float) -> Restarts:
        """The state after one more end."""
        return Restarts(1 if lived_seconds >= STEADY_SECONDS else self.in_a_row + 1)

    @property
    def wait_seconds(self) -> float:
        """The wait before the next start: none after the first end, then doubling."""
        return _doubled(FIRST_WAIT_SECONDS, self.in_a_row - 2)


@dataclass(frozen=True, slots=True)
class Boots:
    """A process's failures to come up.

    Attributes:
        in_a_row: Failures since it was last up.
    """

    in_a_row: int = 0

    def after(self) -> Boots:
        """The state after one more failure."""
        return Boots(self.in_a_row + 1)

    @property
    def wait_seconds(self) -> float:
        """The wait before the next start, doubling from the first."""
        return _doubled(FIRST_BOOT_WAIT_SECONDS, self.in_a_row - 1)


def _doubled(first_seconds: float, times: int) -> float:
    return 0.0 if times < 0 else min(LONGEST_WAIT_SECONDS, first_seconds * 2.0 ** min(times, 20))
