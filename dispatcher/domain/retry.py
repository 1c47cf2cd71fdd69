"""Decides when a deferred email is tried again, never before the provider allows it.

A retry follows under the same lease: exponential backoff with full jitter. A redelivery follows minutes or hours later,
after the attempts under a lease are used up, if redelivery is on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

_MAX_DOUBLINGS: Final = 60
"""More doublings would exceed every cap. The limit keeps the power from overflowing."""
REDELIVERY_WAITS: Final = (60.0, 300.0, 900.0, 3600.0)
"""Seconds before the first redeliveries; the last number also applies to all later ones."""
REDELIVERY_SPREAD: Final = 0.2
"""Each wait is up to this share shorter or longer, so that emails are not all redelivered at the same time."""


class RetryLimits(NamedTuple):
    """What an email's row says about its retries.

    Attributes:
        max_attempts: As in `RetryPolicy`, from the email's lane; None: the host's setting.
        redeliver_seconds: A redelivery may begin within this many seconds: neither the time for redelivery nor the
            email has expired then. Zero or negative: no redelivery.
        redeliveries: How often the email has waited for a redelivery since it was due, or replayed.
    """

    max_attempts: int | None
    redeliver_seconds: float
    redeliveries: int

    def redelivery_wait(self, retry_after: float | None, random: Callable[[], float]) -> float | None:
        """Seconds to wait before the next redelivery; None if it would begin too late.

        Args:
            retry_after: Seconds that the provider asked for.
            random: Returns a number from 0 up to, but not including, 1.
        """
        step = REDELIVERY_WAITS[min(self.redeliveries, len(REDELIVERY_WAITS) - 1)]
        spread = step * REDELIVERY_SPREAD
        # If the provider asks for a longer wait, the spread is only added. `max` ignores a NaN in second place.
        wait = max(step - spread, retry_after or 0.0) + 2 * spread * random()
        return wait if wait < self.redeliver_seconds else None


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

    def limited(self, limits: RetryLimits | None) -> RetryPolicy:
        """This policy with the email's own number of attempts, if it has one."""
        if limits is None or limits.max_attempts is None:
            return self
        return replace(self, max_attempts=limits.max_attempts)
