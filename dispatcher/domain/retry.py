"""Decides when a deferred email is tried again: exponential backoff with full jitter, never before the provider allows
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MAX_DOUBLINGS: Final = 60
"""More doublings would exceed every cap. The limit keeps the power from overflowing."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How many attempts an email gets, and how long the waits between them are.

    Attributes:
        max_attempts: All attempts, including the first.
        base_seconds: Upper bound of the wait before the second attempt. It doubles with each further attempt.
        cap_seconds: Upper bound of every wait. If the provider asks for a longer wait, no retry follows.
    """

    max_attempts: int
    base_seconds: float
    cap_seconds: float

    def wait_before(self, next_attempt: int, retry_after: float | None, random: Callable[[], float]) -> float | None:
        """Seconds to wait before an attempt; None if no attempt may follow.

        Args:
            next_attempt: From 2.
            retry_after: Seconds that the provider asked for. Jitter is added, so that emails are not all retried at the
                same time.
            random: Returns a number from 0 up to, but not including, 1, such as `random.random`.
        """
        asked = 0.0 if retry_after is None else retry_after
        # Written as `not … <=`, because a NaN from the provider must end the retries, too.
        if next_attempt > self.max_attempts or not asked <= self.cap_seconds:
            return None
        doublings = min(max(0, next_attempt - 2), _MAX_DOUBLINGS)
        jitter = random() * min(self.cap_seconds, self.base_seconds * 2.0**doublings)
        return min(self.cap_seconds, max(0.0, asked) + jitter)
