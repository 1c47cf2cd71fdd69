"""Decides whether commits that make emails due notify the relay, or whether the relay polls.

    commits notify ──in BUSY_SAMPLES of SAMPLES seconds, a commit waits for another that notifies──▶ the relay polls
          ▲                                                                                               │
          └──commits that notify would take less than QUIET_SHARE of the time, for QUIET_SECONDS──────────┘

PostgreSQL lets only one notifying transaction of a server commit at a time, and this transaction waits for the disk
and for a synchronous standby meanwhile. So notifications limit all applications of the server together. Under load,
the relay finds the next emails a few milliseconds later without notifications.

No email depends on a notification: in both cases, the relay looks for due emails at least every POLL_SECONDS, and once
per second while it has nothing to do.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from dispatcher.store.outbox import Outbox

POLL_SECONDS: Final = 0.25
"""The longest time between two looks for due emails. Some emails become due without a notification."""
PACE_SECONDS: Final = 0.005
"""The wait after a round that found rows. Rows that are committed in this time share one query, one write and one lease
batch."""
SAMPLES: Final = 5
BUSY_SAMPLES: Final = 3
"""The relay looks once per second whether a commit waits for another one that notifies. At 70 % of the commits that are
possible one after the other, it finds one in two of five seconds; with applications that never pause, in each."""
QUIET_SHARE: Final = 0.7
"""The share: emails that become due per second, times the seconds of a commit."""
QUIET_SECONDS: Final = 5.0
MOST_DOUBLINGS: Final = 4
"""How often QUIET_SECONDS may double. It doubles if commits notify for a shorter time than that before there is load
again. This happens if the relay finds fewer emails than are committed, because they wait for a slow provider."""
COMMITS: Final = 5
"""How many of the relay's own commits are compared. The second longest counts: a busy machine delays single commits,
and under load most commits are short, because the flush of another commit includes them."""


class Notifications:
    """A service of the leading relay: waits for notifications, counts them, and sets whether commits send more. A
    commit may still do as the relay wanted before."""

    interval_seconds = 1.0

    def __init__(
        self,
        outbox: Outbox,
        *,
        poll_seconds: float = POLL_SECONDS,
        quiet_seconds: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.are_on = True
        self.count = 0
        self._outbox = outbox
        self._poll_seconds = poll_seconds
        self._pause_seconds = 0.0
        self._quiet_seconds = quiet_seconds
        self._doublings = 0
        self._waited: deque[bool] = deque(maxlen=SAMPLES)
        self._commits: deque[float] = deque(maxlen=COMMITS)
        self._notified = self._found = 0
        self._clock = clock
        self._counted_at = clock()
        self._busy_at = -math.inf  # the last time of load

    @property
    def wait_seconds(self) -> float:
        return self._poll_seconds if self.are_on else self._pause_seconds

    def note_round(self, found: int) -> None:
        """Counts the emails of a round. If the relay polls, each empty round doubles the wait."""
        self._found += found
        self._pause_seconds = 0.0 if found else min(max(2 * self._pause_seconds, PACE_SECONDS), self._poll_seconds)

    async def wait(self, seconds: float) -> bool:
        """Waits for a notification. Returns whether one arrived."""
        count = await self._outbox.wait(seconds)
        self._notified += count
        self.count += count
        return count > 0

    async def run_once(self) -> None:
        """Reads pending notifications, so that they do not accumulate. Then decides."""
        await self.wait(0.0)
        if self._outbox.commit_seconds:
            self._commits.append(self._outbox.commit_seconds)
        now = self._clock()
        quiet_seconds = self._quiet_seconds * 2**self._doublings
        if self.are_on:
            self._waited.append(self._notified > 0 and await self._outbox.is_notifying_delayed())
            is_on = sum(self._waited) < BUSY_SAMPLES
        else:
            commit_seconds = sorted(self._commits)[-2:][0] if self._commits else 0.0
            rate = self._found / max(now - self._counted_at, self.interval_seconds)
            if rate * commit_seconds >= QUIET_SHARE:
                self._busy_at = now
            is_on = now - self._busy_at >= quiet_seconds
        self._notified = self._found = 0
        self._counted_at = now
        if is_on is self.are_on:
            return
        if not is_on:
            is_short = now - self._busy_at < 2 * quiet_seconds
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS) if is_short else 0
            self._busy_at = now
            self._waited.clear()
        await self._outbox.set_polling(is_on=not is_on)
        self.are_on = is_on
