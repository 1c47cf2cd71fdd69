"""Decides whether commits that make emails due notify the relay, or whether the relay polls.

    commits notify ──notifications keep commits waiting for more than BUSY_SHARE of the time──────▶ the relay polls
          ▲                                                                                              │
          └──they would for less than QUIET_SHARE of the time, for QUIET_SECONDS─────────────────────────┘

PostgreSQL lets only one notifying transaction of a database commit at a time, and this transaction waits for the disk
and for a synchronous standby meanwhile. So notifications limit all applications of the database together. Under load,
the relay finds the next emails a few milliseconds later without notifications.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from dispatcher.store.outbox import Outbox

BUSY_SHARE: Final = 0.1
"""The share: commits that notify (or emails that become due) per second, times the seconds of a commit."""
QUIET_SHARE: Final = 0.05
QUIET_SECONDS: Final = 5.0
COMMITS: Final = 5
"""How many of the relay's own commits are compared. The fastest counts, because a busy machine delays single ones."""
PACE_SECONDS: Final = 0.005
"""The wait after a round that found rows. Rows that are committed in this time share one query, one write and one lease
batch."""


class Notifications:
    """A service of the leading relay: reads pending notifications, so that they do not accumulate, and sets whether
    commits send more.

    Attributes:
        are_on: Whether commits notify the relay. If a transaction has read an older value, a poll finds its emails.
    """

    interval_seconds = 1.0

    def __init__(self, outbox: Outbox, *, poll_seconds: float, quiet_seconds: float = QUIET_SECONDS) -> None:
        self.are_on = True
        self._outbox = outbox
        self._longest_seconds = poll_seconds
        self._poll_seconds = PACE_SECONDS
        self._quiet_seconds = quiet_seconds
        self._commits: deque[float] = deque(maxlen=COMMITS)
        self._notified = 0
        self._found = 0
        self._began_at = self._busy_at = time.monotonic()
        self._has_backlog = False

    @property
    def poll_seconds(self) -> float:
        """How long the relay may wait after a round that found no row."""
        return self._longest_seconds if self.are_on else self._poll_seconds

    def note_round(self, found: int, *, has_backlog: bool) -> None:
        """Counts the emails of a round. Without notifications, each empty round doubles the wait."""
        self._found += found
        self._has_backlog = has_backlog
        self._poll_seconds = PACE_SECONDS if found else min(2 * self._poll_seconds, self._longest_seconds)

    async def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for a notification. Returns whether one arrived."""
        count = await self._outbox.wait(seconds)
        self._notified += count
        return count > 0

    async def switch_on(self) -> None:
        """Lets commits notify the relay, whatever the leader before has set."""
        await self._outbox.set_notification(is_on=True)

    async def run_once(self) -> None:
        """Compares the load since the last round with the time of a commit."""
        await self.wait(0.0)
        now = time.monotonic()
        if self._outbox.commit_seconds:
            self._commits.append(self._outbox.commit_seconds)
        seconds_per_commit = min(self._commits, default=0.0) / max(now - self._began_at, PACE_SECONDS)
        if self.are_on:
            is_on = self._notified * seconds_per_commit <= BUSY_SHARE
        else:
            # Emails of a backlog are found only when a queue has room, so their number is not that of the commits.
            if self._has_backlog or self._found * seconds_per_commit >= QUIET_SHARE:
                self._busy_at = now
            is_on = now - self._busy_at >= self._quiet_seconds
        self._notified = self._found = 0
        self._began_at = now
        if is_on is not self.are_on:
            self._busy_at = now
            await self._outbox.set_notification(is_on=is_on)
            self.are_on = is_on
