"""Decides when a deferred email is tried again: never before the provider allows it.

First, the email is retried under the same lease, with exponential backoff. Half of each wait is random. If these
attempts are used up and redelivery is on, a redelivery follows minutes or hours later. If the recipient is deferred and
redelivery is on, the redelivery follows after one attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from dispatcher.domain.values import dataclass, replace


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


HOST_GRACE_SECONDS: Final = 5.0
"""Grace period after a lease expires, at most half the lease. In this period, only the relay of the owner's host may
recover the email, because that relay can read the owner's in-flight ledger."""
MAX_RECOVERY_INTERVAL_SECONDS: Final = 5.0
"""The longest interval between two searches for expired leases of other hosts."""


def longest_recovery_seconds(lease_seconds: float) -> float:
    """If a host is lost: the longest time from the expiry of one of its leases to the recovery of the leased email.
    Assumes that a relay is the leader."""
    return host_grace_seconds(lease_seconds) + recovery_interval_seconds(lease_seconds)


def host_grace_seconds(lease_seconds: float) -> float:
    """The grace period after a lease expires. During this time, only the relay of the owner's host may recover the
    email."""
    return min(HOST_GRACE_SECONDS, lease_seconds / 2)


def recovery_interval_seconds(lease_seconds: float) -> float:
    """How often the leading relay searches for expired leases of other hosts."""
    return min(MAX_RECOVERY_INTERVAL_SECONDS, lease_seconds / 4)


_MAX_DOUBLINGS: Final = 60
"""The most doublings of a wait. More doublings would exceed every cap, and could overflow the number."""
REDELIVERY_WAITS: Final = (60.0, 300.0, 900.0, 3600.0)
"""Seconds before the first, second, third and fourth redelivery. The last number also applies to later redeliveries."""
REDELIVERY_SPREAD: Final = 0.2
"""Each wait is up to this share shorter or longer, so that emails are not all redelivered at the same time."""


class RetryLimits(NamedTuple):
    """The limits that apply to one email's attempts and redeliveries.

    `max_attempts` is set by the policy of the email's lane; None: the host's setting applies. No redelivery follows if
    `redeliver_seconds`, which are left until the time limit or until the email expires, are zero or less.
    `redeliveries` counts from the email's first due time or last replay.
    """

    max_attempts: int | None
    redeliver_seconds: float
    redeliveries: int

    def redelivery_wait(self, retry_after: float | None, random: Callable[[], float]) -> float | None:
        """Seconds to wait before the next redelivery; None if that redelivery would begin too late."""
        step = REDELIVERY_WAITS[min(self.redeliveries, len(REDELIVERY_WAITS) - 1)]
        spread = step * REDELIVERY_SPREAD
        # The wait must not be shorter than the provider asks for. So `retry_after` is a lower bound, and the spread is
        # only added to it. If `retry_after` is NaN, `max` returns its first argument.
        wait = max(step - spread, retry_after or 0.0) + 2 * spread * random()
        return wait if wait < self.redeliver_seconds else None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How many attempts an email gets, and how long the waits between them are.

    The upper bound of a wait begins at `base_seconds`, and doubles up to `cap_seconds`; no wait is shorter than half of
    its bound. If the provider asks for a wait longer than the cap, no retry follows.
    """

    max_attempts: int
    base_seconds: float
    cap_seconds: float

    def wait_before(
        self, next_attempt: int, retry_after: float | None, random: Callable[[], float], *, failovers: int = 0
    ) -> float | None:
        """Seconds to wait before the next attempt; None if no attempt may follow. To what the provider asked for,
        jitter is added, so that emails are not all retried at the same time.

        A failover has no wait, but is an attempt. So after a round of all providers, the wait is the sum of the waits
        before all attempts of the next round, and after the first round also of the waits that this round left out.
        Otherwise, an email would be tried for a shorter time the more providers there are.
        """
        asked = 0.0 if retry_after is None else retry_after
        # A NaN from the provider must end the retries, too. `asked > self.cap_seconds` would be False for NaN.
        if next_attempt > self.max_attempts or not asked <= self.cap_seconds:
            return None
        first = 2 if next_attempt - failovers <= 2 else next_attempt
        last = min(next_attempt + failovers, self.max_attempts)
        doublings = (min(attempt - 2, _MAX_DOUBLINGS) for attempt in range(first, last + 1))
        longest = sum(min(self.cap_seconds, self.base_seconds * 2.0**count) for count in doublings)
        return min(self.cap_seconds, max(0.0, asked) + longest * (0.5 + 0.5 * random()))

    def limited(self, limits: RetryLimits | None) -> RetryPolicy:
        """This policy with the `max_attempts` that `limits` sets; this policy unchanged if `limits` sets none."""
        if limits is None or limits.max_attempts is None:
            return self
        return replace(self, max_attempts=limits.max_attempts)
