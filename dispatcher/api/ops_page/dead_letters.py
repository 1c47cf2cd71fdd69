"""The pages Dead letters and Held.

Dead letters groups failed and held emails by cause, and lists them. Held shows what is known about each held email.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.dead_filter import LABELS, STATUSES, DeadFilter, email_id_of, read_filter
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.store.failures import CAUSES, DeadGroup, Selection, group_dead, list_dead_page, list_held_page

MOST_GROUPED: Final = 20_000
"""The most emails that are grouped, newest first. If there are more, the page says so."""
MOST_GROUPS: Final = 50


def routes(site: Site) -> list[Route]:
    """The routes of the pages Dead letters and Held."""
    pages = DeadLetterPages(site)
    return [site.get("/dead-letters", pages.show), site.get("/held", pages.show_held)]


@dataclass(frozen=True, slots=True)
class DeadLetterPages:
    """The handlers of the pages Dead letters and Held."""

    site: Site

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with groups of failed and held emails, and the newest of these emails."""
        before = email_id_of(request, "before")
        by = fields.parameter(request, "by")
        by = by if by in CAUSES and (by != "tenant" or visitor.tenant_id is None) else "cause"
        wanted, mistake = _filter_of(request, visitor)
        groups: list[DeadGroup] = []
        rows = []
        if mistake is None:
            async with self.site.session() as session:
                if before is None:
                    groups = await group_dead(session, wanted.selection, by, limit=MOST_GROUPED, groups=MOST_GROUPS)
                rows = await list_dead_page(session, wanted.selection, before=before, limit=fields.PAGE_ROWS + 1)
        return await self.site.page(
            request,
            visitor,
            "dead_letters.html",
            status=200 if mistake is None else 400,
            by=by,
            groups=[(each, _link(by, each)) for each in groups],
            in_all=groups[0].emails_in_all if groups else 0,
            most_grouped=MOST_GROUPED,
            **_list(wanted, mistake, before, rows),
        )

    async def show_held(self, request: Request, visitor: Visitor) -> Response:
        """The page with held emails, oldest first, and everything that helps to decide whether they arrived."""
        after = email_id_of(request, "after")
        wanted, mistake = _filter_of(request, visitor)
        rows = []
        if mistake is None:
            held = replace(wanted.selection, status=Status.HELD)
            async with self.site.session() as session:
                rows = await list_held_page(session, held, after=after, limit=fields.PAGE_ROWS + 1)
        return await self.site.page(
            request,
            visitor,
            "held.html",
            status=200 if mistake is None else 400,
            **_list(wanted, mistake, after, rows),
        )


def _filter_of(request: Request, visitor: Visitor) -> tuple[DeadFilter, Mistake | None]:
    try:
        return read_filter(visitor, request.query_params), None
    except Mistake as mistake:
        typed = {name: fields.parameter(request, name) for name in LABELS}
        return DeadFilter(typed, Selection(tenant_id=visitor.tenant_id)), mistake


def _list(wanted: DeadFilter, mistake: Mistake | None, start: UUID | None, rows: list[Any]) -> dict[str, Any]:
    """The values that a template needs to show a filter and one page of a list.

    Args:
        start: The last email of the previous page; None for the first page.
        rows: The emails of this page, and one more email if there is a next page.
    """
    shown = rows[: fields.PAGE_ROWS]
    return {
        "typed": wanted.typed,
        "labels": LABELS,
        "statuses": STATUSES,
        "error_types": list(Reason),
        "mistake": mistake,
        "is_first": start is None,
        "rows": shown,
        "next": shown[-1].email_id if len(rows) > len(shown) else None,
    }


def _link(by: str, group: DeadGroup) -> Mapping[str, str] | None:
    """The fields of the filter that selects the emails of a group, for the group's link.

    None if no filter can select them: there is no filter for a domain, or for emails without a provider.

    Args:
        by: What the emails are grouped by: `cause`, `domain` or `tenant`.
    """
    names = {"cause": ("error_type", "provider"), "tenant": ("tenant",)}.get(by, ())
    if not names or None in group.keys:
        return None
    return {name: key for name, key in zip(names, group.keys, strict=True) if key is not None}
