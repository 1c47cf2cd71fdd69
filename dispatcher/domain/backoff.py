"""Growing waits with full jitter, for whatever is away and has to be asked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """The waits of one outage.

    Attributes:
        base_seconds: The longest first wait; doubles each time.
        cap_seconds: The longest wait.
        failures: How often it failed since it last worked.
    """

    base_seconds: float
    cap_seconds: float
    failures: int = 0

    def next_wait(self, random: Callable[[], float]) -> float:
        """Notes a failure; returns the seconds to wait, jittered so that not all return at once.

        Args:
            random: From 0 up to 1.
        """
        longest = min(self.cap_seconds, self.base_seconds * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return longest * random()

    def worked(self) -> bool:
        """Notes a success; returns whether it ends an outage."""
        ended, self.failures = self.failures > 0, 0
        return ended
