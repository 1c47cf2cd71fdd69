"""The page Events: what providers reported lately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from starlette.routing import Route

from dispatcher.actions.reported_events import ACTIONS, EXAMINED_EVENTS
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.ops.shared_reading import SharedReading
from dispatcher.store.events import EventCount, count_recent_events
from dispatcher.store.statements import Source

COUNT_SECONDS: Final = 5.0
"""How long all visitors see the same counts before the counts are read again."""


@dataclass(frozen=True, slots=True)
class EventCounts:
    """How many events arrived within the last day, by provider, kind and bounce (such as `hard`), for all tenants.

    Attributes:
        is_cut: Whether the counting stopped at its limit, so that older events of the day are not counted.
        since: When the oldest counted event arrived; None if no event arrived.
    """

    counts: list[EventCount]
    is_cut: bool
    since: datetime | None

    @classmethod
    async def read(cls, source: Source) -> EventCounts:
        """Counts at most the newest 20,000 events."""
        counts = await count_recent_events(source, examined=EXAMINED_EVENTS)
        is_cut = sum(each.events for each in counts) >= EXAMINED_EVENTS
        return cls(counts, is_cut, min((each.since for each in counts), default=None))


def routes(site: Site) -> list[Route]:
    """The route of the page Events: a list, newest arrival first. Visitors who see all tenants also see counts."""
    shared = SharedReading(lambda: EventCounts.read(site.pool), fresh_seconds=COUNT_SECONDS)

    async def more(visitor: Visitor) -> Mapping[str, Any]:
        return {"counts": await shared.fresh() if visitor.tenant_id is None else None}

    return face.pages(site, "/events", ACTIONS, "events.html", more)
