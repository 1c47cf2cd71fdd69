"""The endpoint with which applications poll the events of their emails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.fair_limiter import FairTurns
from dispatcher.api.status_endpoints import TENANT, Parameter, parameters
from dispatcher.domain.api_key import Scope
from dispatcher.store.connections import Pool, session
from dispatcher.store.outgoing_events import Cursor, read_page

DEFAULT_PAGE_EVENTS: Final = 100
MAX_PAGE_EVENTS: Final = 1000


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= MAX_PAGE_EVENTS:
        raise ValueError(f"must be a whole number from 1 to {MAX_PAGE_EVENTS:,}")
    return int(text)


PARAMETERS: Final[Mapping[str, Parameter]] = {
    "after": Parameter(
        Cursor.parse,
        {"type": "string"},
        "The `next` of an earlier response, or the `cursor` of an event. Without it, the response begins with the "
        "oldest event that is kept.",
    ),
    "limit": Parameter(
        _limit,
        {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_EVENTS, "default": DEFAULT_PAGE_EVENTS},
        "The most events per response.",
    ),
}


@dataclass(frozen=True, slots=True)
class FeedEndpoints:
    """Reads the feed of events.

    Attributes:
        reading: Limits concurrent reads.
    """

    access: AccessControl
    pool: Pool
    reading: FairTurns

    async def list(self, request: Request) -> Response:
        """Returns a tenant's events after a cursor, oldest first."""
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {**PARAMETERS, "tenant_id": TENANT})
            tenant = caller.tenant(given.get("tenant_id"))
            async with self.reading.turn(caller.share), session(self.pool) as connection:
                page = await read_page(
                    connection, given.get("after"), tenant=tenant, limit=given.get("limit", DEFAULT_PAGE_EVENTS)
                )
        events: list[dict[str, Any]] = [
            {"id": str(event.event_id), "cursor": cursor, **event.document()} for event, cursor in page.events
        ]
        body = {"events": events, "next": page.next, "has_more": page.has_more}
        return Response(orjson.dumps(body, option=orjson.OPT_UTC_Z), media_type="application/json")
