"""Housekeeping: forgets what is old, on one host at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Final

from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.store.connections import Pool, session
from dispatcher.store.retention import TURN, Pruned, Pruning, Retention
from dispatcher.store.turns import turn
from dispatcher.telemetry.log import get_log

CODES_SECONDS: Final = 60.0
"""How long a one-time code's content may outlive its sending."""
PRUNE_SECONDS: Final = 3600.0
BUSY_SECONDS: Final = 600.0


class Housekeeping:
    """Forgets one-time codes every minute, and prunes every hour."""

    def __init__(self, pool: Pool, retention: Retention, *, interval_seconds: float = CODES_SECONDS) -> None:
        self._pool = pool
        self._retention = retention
        self._interval_seconds = interval_seconds
        self._prune_at = 0.0

    async def run(self) -> None:
        """Keeps house until cancelled; a PostgreSQL that is away is waited for."""
        while True:
            try:
                await self._round()
            except StoreBusy as error:
                # Somebody reads or writes what is to go, a report or a backup: everybody waits behind us while we ask.
                self._prune_at = time.monotonic() + BUSY_SECONDS
                get_log().info("emails.pruning_postponed", reason=error.message, retry_in_seconds=BUSY_SECONDS)
            except StoreUnavailable as error:
                get_log().warning(
                    "store.connection_lost", reason=error.message, retry_in_seconds=self._interval_seconds
                )
            await asyncio.sleep(self._interval_seconds)

    async def _round(self) -> None:
        async with session(self._pool) as opened, turn(opened, TURN) as is_ours:
            if not is_ours:
                return
            pruning = Pruning(opened, self._retention)
            is_full = time.monotonic() >= self._prune_at
            counts: Counter[str] = Counter()
            names: list[str] = []
            async for step in pruning.prune() if is_full else pruning.forget_one_time_codes():
                _add(step, counts, names)
            if is_full:
                self._prune_at = time.monotonic() + PRUNE_SECONDS
        if counts:
            get_log().info("emails.pruned", partitions=names, **{f"{what}_count": n for what, n in counts.items()})


def _add(step: Pruned, counts: Counter[str], names: list[str]) -> None:
    if step.name:
        names.append(step.name)
    else:
        counts[step.what] += step.count
