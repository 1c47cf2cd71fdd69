"""How many events providers reported within the last day, for operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dispatcher.store import operators_lists as store
from dispatcher.store.connections import AsyncSession
from dispatcher.store.operators_lists import EXAMINED_ROWS, EventCount


@dataclass(frozen=True, slots=True)
class EventCounts:
    """How many events arrived within the last day.

    Attributes:
        is_cut: Whether the counting stopped at its limit, so that older events of the day are not counted.
        since: When the oldest counted event arrived; None if no event arrived.
    """

    counts: list[EventCount]
    is_cut: bool
    since: datetime | None


async def count_events(session: AsyncSession) -> EventCounts:
    """Counts the events of the last day by provider, kind and bounce (such as `hard`), for all tenants together.

    Counts at most the newest 20,000 events.
    """
    counts = await store.count_recent_events(session)
    is_cut = sum(each.events for each in counts) >= EXAMINED_ROWS
    return EventCounts(counts, is_cut, min((each.since for each in counts), default=None))
