"""The page Audit: what operators did, when and why. Only for visitors who see all tenants."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.store.operators_lists import AuditFilter, list_audit

PATH: Final = "/audit"
MAX_DETAIL_CHARACTERS: Final = 2000


def routes(site: Site) -> list[Route]:
    """The route of the page Audit."""

    async def show(request: Request, visitor: Visitor) -> Response:
        fields.all_tenants_only(visitor)
        before, mistake, wanted = fields.cursor_of(request), None, AuditFilter()
        try:
            wanted = _filter(request)
        except Mistake as found:
            mistake = found
        async with site.session() as session:
            try:
                page = await list_audit(session, wanted, before=before, limit=fields.PAGE_ROWS)
            except ValueError:
                raise fields.wrong_cursor() from None
        return await site.page(
            request,
            visitor,
            "audit.html",
            status=200 if mistake is None else 400,
            page=page,
            details={entry.audit_id: _detail(entry.detail) for entry in page.rows},
            given={name: fields.parameter(request, name) for name in ("actor", "action", "email", "since")},
            is_first=before is None,
            mistake=mistake,
        )

    return [site.get(PATH, show)]


def _filter(request: Request) -> AuditFilter:
    email = fields.parameter(request, "email")
    try:
        email_id = UUID(email) if email else None
    except ValueError:
        raise Mistake("“Email” must be an email's id.") from None
    return AuditFilter(
        actor=fields.parameter(request, "actor") or None,
        action=fields.parameter(request, "action") or None,
        email_id=email_id,
        since=fields.since_of(fields.parameter(request, "since")),
    )


def _detail(detail: dict[str, Any] | None) -> str:
    """The details of an audit entry as short text, such as `lane: bulk, weight: 5.0`."""
    parts = [
        f"{name}: {value if isinstance(value, str) else orjson.dumps(value, default=str).decode()}"
        for name, value in (detail or {}).items()
        if value is not None
    ]
    return ", ".join(parts)[:MAX_DETAIL_CHARACTERS]
