"""The upkeep of the tables, which one host at a time does: partitions, pruning, the index of the recipients,
statistics, and the delivery states of emails from before an upgrade.

`store.retention` defines what is deleted, in which order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import ClassVar, Final

from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.store import retention
from dispatcher.store.connections import AsyncSession, Pool, connect_async, disable_statement_timeout, session
from dispatcher.store.events import fill_deliveries
from dispatcher.store.named_locks import named_lock
from dispatcher.store.outbox import Outbox
from dispatcher.store.recipients import summarize_recipients
from dispatcher.store.retention import FailedStep, PrunedStep, Pruner, Retention
from dispatcher.store.stats import count_round
from dispatcher.telemetry.log import get_log

PRUNE_SECONDS: Final = 3600.0
BUSY_SECONDS: Final = 600.0
LOCK_WAIT_SECONDS: Final = 60.0
"""The wait before the next try while another host prunes, because that host's round may end soon."""
BACKFILL_EVENTS: Final = 2_000
"""How many events a round of the backfill reads: less than a tenth of a second."""
BACKFILL_PAUSE_SECONDS: Final = 0.5
BACKFILL_WAIT_SECONDS: Final = 60.0
"""The wait for events of hosts of an earlier release."""
COUNTED_EMAILS: Final = 5_000
CHECKED_EMAILS: Final = 10_000
"""How many emails a round counts, and how many emails that were not sent it checks again: a tenth of a second each."""
COUNT_SECONDS: Final = 60.0
COUNT_PAUSE_SECONDS: Final = 0.5
CHECK_PAUSE_SECONDS: Final = 2.0
"""A round that checked as many emails as it may takes 40 ms. So many unsent emails take 2 % of a core."""


class Upkeep:
    """A service that works only while its session holds the lock of its kind."""

    interval_seconds: ClassVar[float] = 3600.0
    lock_name: ClassVar[str]
    busy_seconds: ClassVar[float | None] = None  # the wait while another host holds the lock; None for the interval

    def __init__(self, source: Pool | str) -> None:
        """`source` is a pool to borrow a session from, or the URL for a session of its own: long work must not delay
        the pool's other users."""
        self._source = source

    async def run_once(self) -> float | None:
        opening: AbstractAsyncContextManager[AsyncSession]
        if isinstance(self._source, str):
            opening = await connect_async(self._source, name=f"dispatcher {self.lock_name}")
        else:
            opening = session(self._source)
        async with opening as opened, named_lock(opened, self.lock_name) as is_ours:
            return await self.work(opened) if is_ours else self.busy_seconds

    async def work(self, opened: AsyncSession) -> float | None:
        """Does the work of a round. Returns the seconds until the next round; None for the interval."""
        raise NotImplementedError


class Partitions(Upkeep):
    """Creates the partitions of the next weeks. A service of relays."""

    lock_name = "partitions"

    async def work(self, opened: AsyncSession) -> None:
        if names := await Outbox(opened).make_partitions():
            get_log().info("partition.created", names=names)


class RecipientSummaries(Upkeep):
    """Keeps look-ups by recipient fast: creates missing summaries in the index of the recipients, and replaces
    unfinished ones. The summaries of a million emails take about a second."""

    lock_name = "recipient summaries"

    async def work(self, opened: AsyncSession) -> None:
        await disable_statement_timeout(opened)
        if names := await summarize_recipients(opened):
            get_log().info("partition.summarized", names=names)


class DeliveryBackfill:
    """Sets the delivery states that follow from events which an earlier release stored. See `fill_deliveries`."""

    interval_seconds = BACKFILL_WAIT_SECONDS

    def __init__(self, pool: Pool, *, most: int = BACKFILL_EVENTS) -> None:
        self._pool = pool
        self._most = most

    async def run_once(self) -> float | None:
        if (found := await fill_deliveries(self._pool, most=self._most)) is None:
            return None
        has_ended, count = found
        if has_ended:
            get_log().info("emails.deliveries_filled")
            return None
        return BACKFILL_PAUSE_SECONDS if count == self._most else None


class Counting:
    """Counts emails for the statistics. See `count_stats`."""

    interval_seconds = COUNT_SECONDS

    def __init__(self, pool: Pool, *, most: int = COUNTED_EMAILS, most_open: int = CHECKED_EMAILS) -> None:
        self._pool = pool
        self._most = most
        self._most_open = most_open

    async def run_once(self) -> float | None:
        async with session(self._pool) as opened:
            found = await count_round(opened, most=self._most, most_open=self._most_open)
        if found is None:
            return None
        return COUNT_PAUSE_SECONDS if found.has_more else CHECK_PAUSE_SECONDS if found.has_more_open else None


class OneTimeCodePruning(Upkeep):
    """Deletes the content of one-time codes about a minute after they were sent or cancelled."""

    interval_seconds = 60.0
    lock_name = retention.CODES_LOCK_NAME

    def __init__(self, source: Pool | str, kept: Retention) -> None:
        super().__init__(source)
        self._kept = kept

    async def work(self, opened: AsyncSession) -> None:
        _log_done([step async for step in Pruner(opened, self._kept).delete_one_time_codes()])


class PruningService(Upkeep):
    """Deletes old data. A round may take hours. Logs failures, and does not raise them."""

    interval_seconds = PRUNE_SECONDS
    lock_name = retention.LOCK_NAME
    busy_seconds = LOCK_WAIT_SECONDS

    def __init__(self, source: Pool | str, kept: Retention) -> None:
        super().__init__(source)
        self._kept = kept

    async def run_once(self) -> float | None:
        try:
            return await super().run_once()
        except StoreUnavailable as error:
            get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=BUSY_SECONDS)
            return BUSY_SECONDS

    async def work(self, opened: AsyncSession) -> float:
        done: list[PrunedStep] = []
        next_in_seconds = PRUNE_SECONDS
        try:
            async for step in Pruner(opened, self._kept).prune():
                if not isinstance(step, FailedStep):
                    done.append(step)
                    continue
                # StoreBusy: a report or a backup uses the table. Do not wait for the lock, because all other sessions
                # that need the table would have to wait behind this session. Try again later.
                is_busy = isinstance(step.fault, StoreBusy)
                event, seconds = ("postponed", BUSY_SECONDS) if is_busy else ("failed", PRUNE_SECONDS)
                log = get_log().info if is_busy else get_log().warning
                log(f"emails.pruning_{event}", what=step.what, reason=step.fault.message, retry_in_seconds=seconds)
                next_in_seconds = min(next_in_seconds, seconds)
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
