"""The page Suppressions: the list and the form of the actions, and the form that looks an address up.

Addresses are only in the bodies of requests, never in URLs, which proxies write to their logs.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions import suppressions
from dispatcher.actions.action import path_of
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.suppression import Recipient
from dispatcher.store.suppressions import list_suppressing_tenants

PATH: Final = "/suppressions"


def routes(site: Site) -> list[Route]:
    async def page(
        request: Request, visitor: Visitor, posted: face.Posted = face.NOTHING, looked_up: Any = None
    ) -> Response:
        shown = None if posted.form is None else {"tenant_id": posted.form.get("tenant_id", "")}
        tenants: list[str] = []
        if visitor.tenant_id is None:
            async with site.session() as session:
                tenants = await list_suppressing_tenants(session)
        values = {"path": PATH, "looked_up": looked_up, "filtered": shown, "tenants": tenants}
        values |= {"suppressions": suppressions, "known": {"tenant_id": tenants}}
        return await face.list_page(site, request, visitor, "suppressions.html", suppressions.ACTIONS, posted, **values)

    async def look_up(request: Request, visitor: Visitor, form: Form) -> Response:
        found, _, mistake = await face.listed(site, suppressions.LookUp, request, visitor, form)
        posted = face.Posted(suppressions.LookUp, form, mistake)
        if mistake is not None:
            return await page(request, visitor, posted)
        return await page(
            request, visitor, posted, {"recipient": Recipient.parse(form["recipient"]), "entries": found.rows}
        )

    return [
        site.get(PATH, page),
        site.post(path_of(suppressions.LookUp), look_up, title="Look up a recipient"),
        *face.forms(site, suppressions.ACTIONS, page, PATH),
    ]
