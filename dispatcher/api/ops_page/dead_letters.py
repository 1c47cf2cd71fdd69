"""The pages Dead letters and Held.

Dead letters groups failed and held emails by cause, and lists them. Held shows what is known about each held email.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Page, read
from dispatcher.actions.dlq import ListDead
from dispatcher.actions.held import ListHeld
from dispatcher.api.ops_page import face, fields
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.api.ops_page.zones import zone_of
from dispatcher.domain.failures import DeadGroup
from dispatcher.store.failures import MOST_GROUPED, MOST_GROUPS, group_dead

CAUSES: Final = ("cause", "domain", "tenant")


def routes(site: Site) -> list[Route]:
    async def show(request: Request, visitor: Visitor) -> Response:
        by = fields.parameter(request, "by")
        by = by if by in CAUSES and (by != "tenant" or visitor.tenant_id is None) else "cause"
        page, filters, mistake = await face.listed(site, ListDead, request, visitor)
        groups: list[DeadGroup] = []
        async with site.session() as session:
            lines = await site.lines(session, [each.email_id for each in page.rows])
        if page.rows and "after" not in filters:
            asked = read(ListDead, {}, fields.as_texts(ListDead, filters, zone_of(request)))
            wanted = asked.selected(tenant_id=visitor.tenant_id or asked.tenant_id)
            async with site.session() as session:
                groups = await group_dead(session, wanted, by, limit=MOST_GROUPED, groups=MOST_GROUPS)
        return await site.page(
            request,
            visitor,
            "dead_letters.html",
            status=200 if mistake is None else 400,
            listing=ListDead,
            page=page,
            lines=lines,
            filters=filters,
            typed={name: text for name, text in filters.items() if name not in ("after", "limit")},
            mistake=mistake,
            by=by,
            groups=[(each, _link(by, each)) for each in groups],
            in_all=groups[0].emails_in_all if groups else 0,
            most_grouped=MOST_GROUPED,
        )

    async def evidence(_visitor: Visitor, page: Page[Any]) -> Mapping[str, Any]:
        async with site.session() as session:
            lines = await site.lines(session, [each.email_id for each in page.rows])
        return {"lines": lines, "held": {each.email_id: each for each in page.rows}}

    return [site.get("/dead-letters", show), *face.pages(site, "/held", [ListHeld], "held.html", evidence)]


def _link(by: str, group: DeadGroup) -> Mapping[str, str] | None:
    """The fields of the filter that selects the emails of a group, for the group's link. None: there is no filter for a
    domain."""
    if by == "cause":
        return group.filters or None
    return {"tenant_id": str(group.keys[0])} if by == "tenant" else None
