"""The page Pauses: shows what is paused, by whom, why and until when, and for which providers workers wait. Begins and
ends pauses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions import pauses
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.store.providers import find_troubles

PATH: Final = "/pauses"


def routes(site: Site) -> list[Route]:
    """The routes of the list and of its forms."""
    page = PausePage(site)
    return [site.get(PATH, page.render), *face.forms(site, pauses.ACTIONS, page.render, PATH)]


@dataclass(frozen=True, slots=True)
class PausePage:
    """Renders the page Pauses. Visitors of one tenant see, begin and end only the pause of their tenant."""

    site: Site

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
        found, filters, wrong = await face.listed(self.site, pauses.ListPauses, request, visitor)
        problems = []
        if visitor.tenant_id is None:
            async with self.site.session() as session:
                problems = [each for each in await find_troubles(session) if each.state != "half_open"]
        return await self.site.page(
            request,
            visitor,
            "pauses.html",
            status=200 if (mistake or wrong) is None else 400,
            in_force=found.rows,
            filters=filters,
            problems=problems,
            lanes=self.site.settings.lanes,
            providers=self.site.settings.providers,
            given=form or {},
            mistake=mistake or wrong,
            done=face.done(request, pauses.ACTIONS),
            pauses=pauses,
        )
