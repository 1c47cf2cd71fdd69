"""Housekeeping: forgets what is old, on one host at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.store.connections import Pool, connect_async, session
from dispatcher.store.retention import CODES_TURN, TURN, Failed, Pruned, Pruning, Retention
from dispatcher.store.turns import turn
from dispatcher.telemetry.log import get_log

CODES_SECONDS: Final = 60.0
"""How long a one-time code's content may outlive its sending."""
PRUNE_SECONDS: Final = 3600.0
BUSY_SECONDS: Final = 600.0
TURN_SECONDS: Final = 60.0
"""Another host prunes: its round may be over long before its hour."""


class CodesHousekeeping:
    """Forgets one-time codes every minute."""

    def __init__(self, pool: Pool, retention: Retention) -> None:
        self._pool = pool
        self._retention = retention

    async def run(self) -> None:
        """Keeps house until cancelled; a PostgreSQL that is away is waited for."""
        while True:
            try:
                await self.forget()
            except StoreUnavailable as error:
                get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=CODES_SECONDS)
            await asyncio.sleep(CODES_SECONDS)

    async def forget(self) -> None:
        """One round."""
        async with session(self._pool) as opened, turn(opened, CODES_TURN) as is_ours:
            if is_ours:
                _tell([step async for step in Pruning(opened, self._retention).forget_one_time_codes()])


class Housekeeping:
    """Prunes every hour, in a session of its own: a round may take hours, and neither pool nor codes wait for it."""

    def __init__(self, database_url: str, retention: Retention) -> None:
        self._database_url = database_url
        self._retention = retention

    async def run(self) -> None:
        """Keeps house until cancelled; a PostgreSQL that is away is waited for."""
        while True:
            next_in_seconds = await self.prune()
            await asyncio.sleep(next_in_seconds)

    async def prune(self) -> float:
        """One round; returns in how many seconds the next is due, whatever failed."""
        done: list[Pruned] = []
        next_in_seconds = PRUNE_SECONDS
        try:
            async with (
                await connect_async(self._database_url, name="dispatcher pruning") as opened,
                turn(opened, TURN) as is_ours,
            ):
                if not is_ours:
                    return TURN_SECONDS
                async for step in Pruning(opened, self._retention).prune():
                    if isinstance(step, Failed):
                        next_in_seconds = min(next_in_seconds, _tell_failed(step))
                    else:
                        done.append(step)
        except StoreUnavailable as error:
            get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=BUSY_SECONDS)
            return BUSY_SECONDS
        finally:
            _tell(done)
        return next_in_seconds


def _tell(done: list[Pruned]) -> None:
    names = [step.name for step in done if step.name]
    counts: Counter[str] = Counter()
    for step in done:
        if not step.name:
            counts[step.what] += step.count
    if done:
        get_log().info("emails.pruned", partitions=names, **{f"{what}_count": n for what, n in counts.items()})


def _tell_failed(step: Failed) -> float:
    """Returns in how many seconds to try again."""
    reason = step.fault.message
    if isinstance(step.fault, StoreBusy):
        # Somebody reads or writes what is to go, a report or a backup: everybody waits behind us while we ask.
        get_log().info("emails.pruning_postponed", what=step.what, reason=reason, retry_in_seconds=BUSY_SECONDS)
        return BUSY_SECONDS
    get_log().warning("emails.pruning_failed", what=step.what, reason=reason, retry_in_seconds=PRUNE_SECONDS)
    return PRUNE_SECONDS
