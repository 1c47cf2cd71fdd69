"""The page Pauses: shows what is paused, by whom, why and until when, and for which providers workers wait. Begins and
ends pauses. Visitors of one tenant see, begin and end only the pause of their tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from dispatcher.actions import pauses
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.store.controls import list_tenants_with_emails
from dispatcher.store.providers import find_troubles


def routes(site: Site) -> list[Route]:
    async def more(visitor: Visitor) -> Mapping[str, Any]:
        if visitor.tenant_id is not None:
            return {"problems": [], "known": {}}
        async with site.session() as session:
            problems = [each for each in await find_troubles(session) if each.state != "half_open"]
            tenants = await list_tenants_with_emails(session)
        return {"problems": problems, "known": {"lane": lanes, "provider": providers, "tenant_id": tenants}}

    lanes, providers = list(site.settings.lanes), site.settings.providers
    values = {"lanes": lanes, "providers": providers, "pauses": pauses}
    return face.pages(site, "/pauses", pauses.ACTIONS, "pauses.html", more, **values)
