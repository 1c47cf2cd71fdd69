"""When a deferred email is tried again: exponential backoff with full jitter, never before the provider allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MAX_DOUBLINGS: Final = 60
"""Beyond any cap; keeps the power from overflowing."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon.

    Attributes:
        max_attempts: Attempts in all, the first included.
        base_seconds: The longest wait before the second attempt; doubles with each one after.
        cap_seconds: The longest wait before any; also how long a lease is held for a provider that asks us to wait.
    """

    max_attempts: int
    base_seconds: float
    cap_seconds: float

    def wait_before(self, next_attempt: int, retry_after: float | None, random: Callable[[], float]) -> float | None:
        """Seconds to wait before an attempt; None if there is to be none.

        Args:
            next_attempt: From 2.
            retry_after: Seconds that the provider asked for; the jitter comes on top, so that not all return at once.
            random: From 0 up to 1, such as `random.random`.
        """
        asked = 0.0 if retry_after is None else retry_after
        # Put this way round, a provider's NaN gives up too.
        if next_attempt > self.max_attempts or not asked <= self.cap_seconds:
            return None
        doublings = min(max(0, next_attempt - 2), _MAX_DOUBLINGS)
        jitter = random() * min(self.cap_seconds, self.base_seconds * 2.0**doublings)
        return min(self.cap_seconds, max(0.0, asked) + jitter)
