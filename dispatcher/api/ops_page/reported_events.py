"""The page Events: what providers reported lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.provider_event import EventKind
from dispatcher.ops.cached import Cached
from dispatcher.ops.reported_events import EventCounts, count_events
from dispatcher.store.operators_lists import EventFilter, list_events

COUNT_SECONDS: Final = 5.0
"""How long all visitors see the same counts before the counts are read again."""


def routes(site: Site) -> list[Route]:
    """The route of the page Events."""
    return [site.get("/events", EventPages(site, Cached(count_events, COUNT_SECONDS)).show)]


@dataclass(frozen=True, slots=True)
class EventPages:
    """The handler of the page Events."""

    site: Site
    counts: Cached[EventCounts]

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with a list of events, newest arrival first.

        Visitors who see all tenants also see counts by kind.
        """
        before, mistake, since = fields.cursor_of(request), None, None
        kind = fields.parameter(request, "kind")
        try:
            since = fields.since_of(fields.parameter(request, "since"))
        except Mistake as found:
            mistake = found
        wanted = EventFilter(
            tenant_id=visitor.tenant_id or fields.parameter(request, "tenant") or None,
            provider=fields.parameter(request, "provider") or None,
            kind=EventKind(kind) if kind in tuple(EventKind) else None,
            since=since,
        )
        async with self.site.session() as session:
            try:
                page = await list_events(session, wanted, before=before, limit=fields.PAGE_ROWS)
            except ValueError:
                raise fields.wrong_cursor() from None
        counts = await self.counts.get(self.site.session) if visitor.tenant_id is None else None
        return await self.site.page(
            request,
            visitor,
            "events.html",
            status=200 if mistake is None else 400,
            page=page,
            counts=counts,
            kinds=list(EventKind),
            wanted=wanted,
            since=fields.parameter(request, "since"),
            is_first=before is None,
            mistake=mistake,
        )
