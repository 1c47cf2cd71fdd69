"""Prunes old data at intervals, on one host at a time. `store.retention` defines what is deleted, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.store.connections import Pool, connect_async, session
from dispatcher.store.named_locks import named_lock
from dispatcher.store.retention import CODES_LOCK_NAME, LOCK_NAME, FailedStep, PrunedStep, Pruner, Retention
from dispatcher.telemetry.log import get_log

PRUNE_SECONDS: Final = 3600.0
BUSY_SECONDS: Final = 600.0
LOCK_WAIT_SECONDS: Final = 60.0
"""The wait before the next try while another host prunes, because that host's round may end soon."""


class OneTimeCodePruning:
    """A service of each monitor: deletes the content of one-time codes about a minute after they were sent or
    cancelled."""

    interval_seconds = 60.0

    def __init__(self, pool: Pool, retention: Retention) -> None:
        self._pool = pool
        self._retention = retention

    async def run_once(self) -> None:
        """Deletes the content that is due for deletion, unless another host is doing so."""
        async with session(self._pool) as opened, named_lock(opened, CODES_LOCK_NAME) as is_ours:
            if is_ours:
                _log_done([step async for step in Pruner(opened, self._retention).delete_one_time_codes()])


class PruningService:
    """Deletes old data. A service of each monitor, with a separate session: a round may take hours and must not delay
    other services."""

    interval_seconds = PRUNE_SECONDS

    def __init__(self, database_url: str, retention: Retention) -> None:
        self._database_url = database_url
        self._retention = retention

    async def run_once(self) -> float:
        """Deletes old data, unless another host is doing so. Returns the seconds until the next round.

        Logs failures, and does not raise them.
        """
        done: list[PrunedStep] = []
        next_in_seconds = PRUNE_SECONDS
        try:
            async with (
                await connect_async(self._database_url, name="dispatcher pruning") as opened,
                named_lock(opened, LOCK_NAME) as is_ours,
            ):
                if not is_ours:
                    return LOCK_WAIT_SECONDS
                async for step in Pruner(opened, self._retention).prune():
                    if isinstance(step, FailedStep):
                        next_in_seconds = min(next_in_seconds, _log_failed(step))
                    else:
                        done.append(step)
        except StoreUnavailable as error:
            get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=BUSY_SECONDS)
            return BUSY_SECONDS
        finally:
            _log_done(done)
        return next_in_seconds


def _log_done(done: Sequence[PrunedStep]) -> None:
    counts: Counter[str] = Counter()
    for step in done:
        if not step.name:
            counts[f"{step.what}_count"] += step.count
    if done:
        get_log().info("emails.pruned", partitions=[step.name for step in done if step.name], **counts)


def _log_failed(step: FailedStep) -> float:
    """Logs a step of the pruning that failed. Returns the seconds until the next try."""
    # StoreBusy: a report or a backup uses the table. Do not wait for the lock, because all other sessions that need the
    # table would have to wait behind this session. Try again later.
    is_busy = isinstance(step.fault, StoreBusy)
    event, seconds = ("postponed", BUSY_SECONDS) if is_busy else ("failed", PRUNE_SECONDS)
    log = get_log().info if is_busy else get_log().warning
    log(f"emails.pruning_{event}", what=step.what, reason=step.fault.message, retry_in_seconds=seconds)
    return seconds
