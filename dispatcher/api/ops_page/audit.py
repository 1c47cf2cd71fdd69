"""The page Audit: what operators did, one row per act. The log itself has an entry for each email."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.audit import ListAudit
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.audit import AuditEntry
from dispatcher.domain.kinds import cursor_text

MOST_ENTRIES: Final = 1000
"""The most entries that a page reads."""
_ONE_ACT: Final = timedelta(minutes=1)
"""Entries with the same words belong to one act if they follow each other within this time."""


@dataclass(slots=True)
class OneAct:
    """An act: its newest and its oldest entry, and how many emails it changed."""

    newest: AuditEntry
    oldest: AuditEntry
    emails: int = 1

    @property
    def detail(self) -> Mapping[str, Any]:
        """The details of an act on one subject, with instants as such."""
        found = dict(self.newest.detail or {}) if self.emails == 1 else {}
        for name, value in found.items():
            if isinstance(value, str) and value[4:5] == "-":
                with suppress(ValueError):
                    at = datetime.fromisoformat(value)
                    found[name] = at if at.tzinfo else value  # a name may look like a date
        return {name: value for name, value in found.items() if value is not None}


def acts_of(entries: Iterable[AuditEntry]) -> list[OneAct]:
    """Joins entries, which are newest first, to acts."""
    found: list[OneAct] = []
    for each in entries:
        last = found[-1].oldest if found else None
        if (
            last is not None
            and last.email_id
            and each.email_id
            and (last.actor, last.action, last.reason) == (each.actor, each.action, each.reason)
            and last.acted_at - each.acted_at < _ONE_ACT
        ):
            found[-1].oldest = each
            found[-1].emails += 1
        else:
            found.append(OneAct(each, each))
    return found


def routes(site: Site) -> list[Route]:
    async def show(request: Request, visitor: Visitor) -> Response:
        found, filters, mistake = await face.listed(site, ListAudit, request, visitor, most=MOST_ENTRIES)
        acts, size = acts_of(found.rows), int(filters.get("limit", "50"))
        cursor = found.next
        if len(acts) > size:
            cursor = cursor_text(getattr(acts[size - 1].oldest, name) for name in ListAudit.key)
        values = {"listing": ListAudit, "acts": acts[:size], "next": cursor, "filters": filters}
        posted = face.Posted(mistake=mistake)
        return await face.shown(site, request, visitor, "audit.html", [ListAudit], posted, **values)

    return [site.get("/audit", show)]
