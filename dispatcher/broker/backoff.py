"""How long to wait before connecting again: exponential, with full jitter, so that a fleet does not return at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

_MAX_DOUBLINGS: Final = 30


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts.

    Attributes:
        base_seconds: The longest wait after the first failure; doubles with each one after.
        cap_seconds: The longest wait of all.
    """

    base_seconds: float = 0.5
    cap_seconds: float = 15.0

    def wait_after(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, from 1."""
        longest = min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
        return random.uniform(0, longest)  # noqa: S311  # spreads load, guards nothing
