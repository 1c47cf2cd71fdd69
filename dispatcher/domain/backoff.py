"""How long to wait between tries to reach a server: exponential backoff with full jitter."""

from __future__ import annotations

from collections.abc import Callable

from dispatcher.domain.values import dataclass


@dataclass(slots=True)
class Backoff:
    """The waits between tries during one outage. The upper bound begins at `base_seconds`, and doubles with each
    failure, up to `cap_seconds`."""

    base_seconds: float
    cap_seconds: float
    failures: int = 0

    def next_wait(self, random: Callable[[], float]) -> float:
        """Records a failure, and returns the seconds to wait: a random share, from 0 up to 1, of the upper bound."""
        longest = min(self.cap_seconds, self.base_seconds * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return longest * random()

    def reset(self) -> bool:
        """Records a success. Returns whether there was a failure since the last success."""
        ended, self.failures = self.failures > 0, 0
        return ended
