"""The page Suppressions: the list and the form of the actions, and the form that looks an address up.

Addresses are only in the bodies of requests, never in URLs, which proxies write to their logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions import suppressions
from dispatcher.actions.action import path_of
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.suppression import Recipient

PATH: Final = "/suppressions"


def routes(site: Site) -> list[Route]:
    """The routes of the page and of its forms."""
    pages = SuppressionPages(site)
    return [
        site.get(PATH, pages.render),
        site.post(path_of(suppressions.LookUp), pages.look_up, title="Look up a recipient"),
        *face.forms(site, suppressions.ACTIONS, pages.render, PATH),
    ]


@dataclass(frozen=True, slots=True)
class SuppressionPages:
    """The handlers of the page Suppressions."""

    site: Site

    async def look_up(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """The page with the entries that suppress an address or a domain."""
        found, _, mistake = await face.listed(self.site, suppressions.LookUp, request, visitor, form)
        if mistake is not None:
            return await self.render(request, visitor, form=form, mistake=mistake)
        looked_up = {"recipient": Recipient.parse(form["recipient"]), "entries": found.rows}
        return await self.render(request, visitor, form=form, looked_up=looked_up)

    async def render(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Form | None = None,
        mistake: Mistake | None = None,
        secret: str | None = None,
        looked_up: Mapping[str, Any] | None = None,
    ) -> Response:
        """The page with the entries of a tenant, newest first."""
        del secret  # no action on this page has one
        listing = suppressions.ListSuppressions
        shown = None if form is None else {"tenant_id": form.get("tenant_id", "")}
        found, filters, wrong = await face.listed(self.site, listing, request, visitor, shown)
        mistake = mistake or wrong
        return await self.site.page(
            request,
            visitor,
            "suppressions.html",
            status=200 if mistake is None else 400,
            suppressions=suppressions,
            page=found,
            path=PATH,
            filters=filters,
            given=form or filters,
            mistake=mistake,
            looked_up=looked_up,
            done=face.done(request, suppressions.ACTIONS),
        )
