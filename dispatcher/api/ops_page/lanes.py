"""The page Lanes and tenants: shares, policies, senders, ceilings, due emails.

Only for visitors who see all tenants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions import lanes, tenants
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.ops.shared_reading import SharedReading
from dispatcher.store.controls import MOST_DUE, MOST_PAIRS, Due, count_due, read_controls

PATH: Final = "/lanes"
DUE_SECONDS: Final = 1.0
ACTIONS: Final = (*lanes.ACTIONS, *tenants.ACTIONS)


def routes(site: Site) -> list[Route]:
    """The routes of the page and of its forms."""
    page = LanePage(site, SharedReading(lambda: count_due(site.pool), fresh_seconds=DUE_SECONDS))
    return [site.get(PATH, page.render), *face.forms(site, ACTIONS, page.render, PATH)]


@dataclass(frozen=True, slots=True)
class LanePage:
    """Renders the page Lanes and tenants."""

    site: Site
    due: SharedReading[list[Due]]

    async def render(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Form | None = None,
        mistake: Mistake | None = None,
        secret: str | None = None,
    ) -> Response:
        """The page, with a mistake in one of its forms if there is one."""
        del secret  # no action on this page has one
        shown, _, _ = await face.listed(self.site, lanes.ListLanes, request, visitor)
        async with self.site.session() as session:
            controls = await read_controls(session)
        return await self.site.page(
            request,
            visitor,
            "lanes.html",
            status=200 if mistake is None else 400,
            shares=shown.rows,
            limits=list(controls.tenants.values()),
            controls=controls,
            due=await self.due.fresh(),
            most_due=MOST_DUE,
            most_pairs=MOST_PAIRS,
            given=form or {},
            mistake=mistake,
            done=face.done(request, ACTIONS),
            lanes=lanes,
            tenants=tenants,
        )
