"""Which leases have not been renewed for most of their length, by our own steady clock.

PostgreSQL's clock says when a lease ends, and that clock can be set: after a step forward every living lease has run
out. A living worker renews each of its leases after a third to a half of its length, and a renewal always moves the
end. So a lease counts as expired only if we have also seen the same end for `SHARE` of a lease. Watching begins before
the end, so that this delays nothing while clocks are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.host.clock import steady_clock
from dispatcher.store.settlement import FoundLease

SHARE: Final = 3 / 4
"""Of a lease: a worker renews after a half at the latest, and may be a sixth later after a failed statement."""
LONGEST_GAP_SECONDS: Final = 12.0
"""Between two looks; a sixth of a lease if that is longer. A relay without RabbitMQ looks each ten seconds. After a
longer gap PostgreSQL may have been away, so that no worker could renew: the watch begins anew."""

_End = tuple[UUID, int, datetime]


class Unrenewed:
    """How long leases have kept the same end."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float] = steady_clock) -> None:
        self.within_seconds = SHARE * lease_seconds
        """Look at leases that run out within so long."""
        self._longest_gap_seconds = max(LONGEST_GAP_SECONDS, lease_seconds / 6)
        self._clock = clock
        self._looked_at = clock()
        self._seen_at: dict[_End, float] = {}

    def look(self, leases: Iterable[FoundLease]) -> None:
        """Notes what a look has found: every lease that runs out within `within_seconds`."""
        now = self._clock()
        if now - self._looked_at > self._longest_gap_seconds:
            self._seen_at.clear()
        self._looked_at = now
        self._seen_at = {end: self._seen_at.get(end, now) for end in map(_end, leases)}

    def has_expired(self, lease: FoundLease, *, patience_seconds: float = 0.0) -> bool:
        """Whether a lease of the last look has run out by PostgreSQL's clock and by ours.

        Args:
            patience_seconds: So much longer it must have kept its end.
        """
        unrenewed_seconds = self._looked_at - self._seen_at[_end(lease)]
        return lease.has_run_out and unrenewed_seconds >= self.within_seconds + patience_seconds


def _end(lease: FoundLease) -> _End:
    return lease.email_id, lease.token, lease.expired_at
