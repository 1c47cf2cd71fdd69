"""Forgets what is old, on one host at a time. What goes, and in which order, says `store.retention`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.store.connections import Pool, connect_async, session
from dispatcher.store.retention import CODES_TURN, TURN, Failed, Pruned, Pruning, Retention
from dispatcher.store.turns import turn
from dispatcher.telemetry.log import get_log

PRUNE_SECONDS: Final = 3600.0
BUSY_SECONDS: Final = 600.0
TURN_SECONDS: Final = 60.0
"""Another host prunes: its round may be over long before its hour."""


class ForgetCodes:
    """A service of each monitor: one-time codes go within a minute of their sending."""

    interval_seconds = 60.0

    def __init__(self, pool: Pool, retention: Retention) -> None:
        self._pool = pool
        self._retention = retention

    async def run_once(self) -> None:
        """One round."""
        async with session(self._pool) as opened, turn(opened, CODES_TURN) as is_ours:
            if is_ours:
                _log_done([step async for step in Pruning(opened, self._retention).forget_one_time_codes()])


class Prune:
    """A service of each monitor, in a session of its own: a round may take hours, and no other service waits for it."""

    interval_seconds = PRUNE_SECONDS

    def __init__(self, database_url: str, retention: Retention) -> None:
        self._database_url = database_url
        self._retention = retention

    async def run_once(self) -> float:
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
                        next_in_seconds = min(next_in_seconds, _log_failed(step))
                    else:
                        done.append(step)
        except StoreUnavailable as error:
            get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=BUSY_SECONDS)
            return BUSY_SECONDS
        finally:
            _log_done(done)
        return next_in_seconds


def _log_done(done: Sequence[Pruned]) -> None:
    counts: Counter[str] = Counter()
    for step in done:
        if not step.name:
            counts[f"{step.what}_count"] += step.count
    if done:
        get_log().info("emails.pruned", partitions=[step.name for step in done if step.name], **counts)


def _log_failed(step: Failed) -> float:
    """Returns in how many seconds to try again."""
    # Busy: somebody reads or writes what is to go, a report or a backup. Everybody waits behind us while we ask.
    is_busy = isinstance(step.fault, StoreBusy)
    event, seconds = ("postponed", BUSY_SECONDS) if is_busy else ("failed", PRUNE_SECONDS)
    log = get_log().info if is_busy else get_log().warning
    log(f"emails.pruning_{event}", what=step.what, reason=step.fault.message, retry_in_seconds=seconds)
    return seconds
