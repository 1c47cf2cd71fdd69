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
from dispatcher.store.providers import find_troubles


def routes(site: Site) -> list[Route]:
    async def more(visitor: Visitor, _page: object) -> Mapping[str, Any]:
        if visitor.tenant_id is not None:
            return {"problems": []}
        async with site.session() as session:
            return {"problems": [each for each in await find_troubles(session) if each.state != "half_open"]}

    values = {"lanes": list(site.settings.lanes), "providers": site.settings.providers, "pauses": pauses}
    return face.pages(site, "/pauses", pauses.ACTIONS, "pauses.html", more, **values)
