"""Lists as CSV files: the rows that a list's filter selects, without addresses, on the record of the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Mistakes, Paged, read
from dispatcher.actions.audit import ListAudit
from dispatcher.actions.dlq import ListDead
from dispatcher.actions.emails import ListEmails
from dispatcher.actions.held import ListHeld
from dispatcher.actions.reported_events import ListReportedEvents
from dispatcher.api.ops_page import face, fields
from dispatcher.api.ops_page.captured import as_file
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.api.ops_page.zones import zone_of
from dispatcher.ops.csv_text import csv_text
from dispatcher.store.failures import audit

EXPORTED: Final[Mapping[str, type[Paged[Any]]]] = {
    "/emails": ListEmails,
    "/dead-letters": ListDead,
    "/held": ListHeld,
    "/events": ListReportedEvents,
    "/audit": ListAudit,
}
MOST: Final = 10_000
"""The most rows of a file."""
_PAGE: Final = 1_000
_MOST_PAGES: Final = 30
"""The most pages that are read: a filter that matches little reads pages without rows."""


def routes(site: Site) -> list[Route]:
    return [site.get(f"{path}.csv", partial(_export, site, path, each)) for path, each in EXPORTED.items()]


async def _export(site: Site, path: str, listing: type[Paged[Any]], request: Request, visitor: Visitor) -> Response:
    filters = fields.typed(request.query_params, [name for name in listing.fields if name not in ("after", "limit")])
    try:
        asked = read(listing, {}, fields.as_texts(listing, filters, zone_of(request))).but(limit=_PAGE)
        page = await face.rows(site, asked, visitor)
        found = [*page.rows]
        for _ in range(_MOST_PAGES):
            if page.next is None or len(found) >= MOST:
                break
            page = await face.rows(site, asked.but(after=page.next), visitor)
            found += page.rows
    except Mistakes as error:
        raise PageError(400, face.words_of(error), "Go back, and correct the filter.") from None
    # The names of the filters, because a value may be an address.
    is_cut = page.next is not None or len(found) > MOST
    detail = {"list": path[1:], "rows": len(found[:MOST]), "is_cut": is_cut, "filters": sorted(filters)}
    async with site.session() as session:
        await audit(session, "export", {None: detail}, actor=visitor.name, reason=None)
    name = f"{path[1:]}-newest.csv" if is_cut else f"{path[1:]}.csv"
    return as_file(csv_text(listing.row.__match_args__, found[:MOST]).encode(), name)
