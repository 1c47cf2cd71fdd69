"""Exponential waits with full jitter between retries of an unreachable server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """The waits between retries during one outage.

    Attributes:
        base_seconds: Upper bound of the first wait. It doubles with each failure.
        cap_seconds: Upper bound of every wait.
        failures: Failures since the last success.
    """

    base_seconds: float
    cap_seconds: float
    failures: int = 0

    def next_wait(self, random: Callable[[], float]) -> float:
        """Records a failure, and returns the seconds to wait. The jitter keeps clients from retrying at the same time.

        Args:
            random: Returns a number from 0 up to, but not including, 1.
        """
        longest = min(self.cap_seconds, self.base_seconds * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return longest * random()

    def reset(self) -> bool:
        """Records a success. Returns whether it ends an outage."""
        ended, self.failures = self.failures > 0, 0
        return ended
