"""The page Events: what providers reported lately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from starlette.routing import Route

from dispatcher.actions.reported_events import ACTIONS, EXAMINED_EVENTS
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.ops.shared_reading import SharedReading
from dispatcher.store.events import EventCount, count_recent_events
from dispatcher.store.statements import Source

LIMITS: Final[Mapping[str, float]] = {"bounced (hard)": 0.05, "complained": 0.001}
"""The shares of the emails above which providers, such as SES, stop accepting an account's emails."""
LEAST_REPORTED: Final = 100
"""A share of fewer emails than this is no reason for a warning."""
SHARES: Final[dict[str, Any]] = {"limits": LIMITS, "least_reported": LEAST_REPORTED}
"""What the macro `share` of admin_parts.html needs."""
COUNT_SECONDS: Final = 5.0
"""How long all visitors see the same counts before the counts are read again."""


class Tile(NamedTuple):
    """How many events of a kind arrived, and of how many emails a final report (delivered, bounced, rejected)."""

    kind: str
    bounce: str | None
    events: int
    reported: int

    @property
    def name(self) -> str:
        return f"{self.kind} ({self.bounce})" if self.bounce else self.kind

    @property
    def share(self) -> float | None:
        """The events per email whose end was reported; None if there is no such email."""
        return self.events / self.reported if self.reported else None

    @property
    def limit(self) -> float | None:
        return LIMITS.get(self.name)

    @property
    def is_above_limit(self) -> bool:
        share, limit = self.share, self.limit
        return share is not None and limit is not None and self.reported >= LEAST_REPORTED and share > limit


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

    @property
    def tiles(self) -> list[Tile]:
        """For each kind, all providers' events together."""
        sums = Counter[tuple[str, str | None]]()
        for each in self.counts:
            sums[each.kind, each.bounce] += each.events
        reported = sum(number for (kind, _), number in sums.items() if kind in ("delivered", "bounced", "rejected"))
        return [Tile(kind, bounce, number, reported) for (kind, bounce), number in sorted(sums.items(), key=str)]

    @classmethod
    async def read(cls, source: Source) -> EventCounts:
        """Counts at most the newest 20,000 events."""
        counts = await count_recent_events(source, examined=EXAMINED_EVENTS)
        is_cut = sum(each.events for each in counts) >= EXAMINED_EVENTS
        return cls(counts, is_cut, min((each.since for each in counts), default=None))


def routes(site: Site) -> list[Route]:
    """The route of the page Events: a list, newest arrival first. Visitors who see all tenants also see counts."""
    shared = SharedReading(lambda: EventCounts.read(site.pool), fresh_seconds=COUNT_SECONDS)

    async def more(visitor: Visitor, _page: object) -> Mapping[str, Any]:
        return {"counts": await shared.fresh() if visitor.tenant_id is None else None}

    return face.pages(site, "/events", ACTIONS, "events.html", more)
