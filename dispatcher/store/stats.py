"""Counts emails for the statistics, in rounds that each commit the counts together with how far they came."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from dispatcher.domain.stats import Per, SplitCount, Stats
from dispatcher.domain.values import dataclass
from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import Source, fetch, statement

MOST_ROWS: Final = 2_000
"""The most rows of an hour, and of a day. One hour's rows are read in about a millisecond."""
KEPT_ROWS: Final = 1_500
"""How many rows stay on their own when there are more than `MOST_ROWS`."""
LATE_SECONDS: Final = 30.0
"""For how long an email may be inserted after its id was made, by clocks that differ."""


@dataclass(frozen=True, slots=True)
class CountedRound:
    """What a round of counting left: whether emails or events can be counted at once, and whether more emails that were
    not sent can be checked; and the hours whose counts changed."""

    has_more: bool
    has_more_open: bool
    hours: Sequence[datetime]


@statement
async def lock_stats(source: Source) -> bool: ...
@statement
async def fold_stats(source: Source, hours: Sequence[datetime], *, most: int, keep: int, tenants: bool) -> None: ...
@statement
async def list_stats(
    source: Source,
    *,
    per: Per,
    since: datetime,
    until: datetime,
    tenant_id: str | None,
    lane: str | None = None,
    provider: str | None = None,
    tag: str | None = None,
) -> list[Stats]: ...
@statement
async def split_stats(
    source: Source, *, is_day: bool, since: datetime, split: Per, tenant_id: str | None
) -> list[SplitCount]: ...


async def count_round(
    session: AsyncSession,
    *,
    most: int,
    most_open: int,
    most_rows: int = MOST_ROWS,
    keep_rows: int = KEPT_ROWS,
    late_seconds: float = LATE_SECONDS,
) -> CountedRound | None:
    """Counts at most `most` emails and as many events, and checks `most_open` emails again. None: another session
    counts at the moment."""
    async with session.transaction():
        if not await lock_stats(session):
            return None
        parameters = {"most": most, "most_open": most_open, "late_seconds": late_seconds}
        (found,) = await fetch(session, "count_stats", parameters, into=CountedRound)
        if found.hours:
            for tenants in (False, True):
                await fold_stats(session, found.hours, most=most_rows, keep=keep_rows, tenants=tenants)
    return found
