"""Finds leases that have not been renewed for most of their length, by this host's monotonic clock.

PostgreSQL's clock defines the end of a lease, but that clock can be set: after a jump forward, every live lease looks
expired. A live worker renews each lease after a third to a half of its length, and each renewal moves the lease's end.
So a lease counts as expired only if its end has also not moved for `SHARE` of its length, by the monotonic clock. The
observation starts before the end of the lease, so it causes no delay while the clocks are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.host.clock import steady_clock
from dispatcher.store.settlement import FoundLease

SHARE: Final = 3 / 4
"""The end of a lease must stay the same for this share of the lease's length. A worker renews a lease after half of the
lease's length at the latest. If the renewal fails, the worker tries again after a sixth of the length."""
LONGEST_GAP_SECONDS: Final = 12.0
"""The longest time between two observations, or a sixth of a lease if that is longer. After a longer gap, the
observation starts again, because perhaps no worker could reach PostgreSQL during the gap. A relay that cannot reach
RabbitMQ observes every ten seconds."""

_End = tuple[UUID, int, datetime]


class UnrenewedLeases:
    """Measures for how long the end of each lease has not moved: each renewal moves it."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float] = steady_clock) -> None:
        self.within_seconds = SHARE * lease_seconds
        """The caller must pass to `observe` all leases that end within this time."""
        self._longest_gap_seconds = max(LONGEST_GAP_SECONDS, lease_seconds / 6)
        self._clock = clock
        self._observed_at = clock()
        self._same_end_since: dict[_End, float] = {}

    def observe(self, leases: Iterable[FoundLease]) -> None:
        """Observes leases. Pass all leases that end within `within_seconds`, as just read from PostgreSQL."""
        now = self._clock()
        if now - self._observed_at > self._longest_gap_seconds:
            self._same_end_since.clear()
        self._observed_at = now
        self._same_end_since = {end: self._same_end_since.get(end, now) for end in map(_end, leases)}

    def has_expired(self, lease: FoundLease, *, grace_seconds: float = 0.0) -> bool:
        """Whether a lease of the last observation has expired by PostgreSQL's clock, and has not moved for
        `within_seconds` plus the grace by the monotonic clock."""
        unrenewed_seconds = self._observed_at - self._same_end_since[_end(lease)]
        return lease.has_run_out and unrenewed_seconds >= self.within_seconds + grace_seconds


def _end(lease: FoundLease) -> _End:
    return lease.email_id, lease.token, lease.expired_at
