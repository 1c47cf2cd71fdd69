"""The page Senders: what DNS says about the domains of senders. Only for visitors who see all tenants."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.ops.sender_dns import SenderFinding, examine
from dispatcher.ops.shared_reading import SharedReading
from dispatcher.store.api_keys import list_keys

FRESH_SECONDS: Final = 60.0


def routes(site: Site) -> list[Route]:
    async def read() -> list[SenderFinding]:
        async with site.session() as session:
            keys = await list_keys(session)
        return await asyncio.to_thread(examine, site.settings, keys)

    reading = SharedReading(read, fresh_seconds=FRESH_SECONDS)

    async def show(request: Request, visitor: Visitor) -> Response:
        fields.all_tenants_only(visitor)
        return await site.page(request, visitor, "senders.html", findings=(await reading.get()).value)

    return [site.get("/senders", show)]
