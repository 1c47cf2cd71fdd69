"""The page Suppressions: looks an address up, lists the entries of a tenant, adds and removes entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.suppression import Recipient, SuppressionReason
from dispatcher.errors import InvalidEmail
from dispatcher.ops import suppressions

PATH: Final = "/suppressions"
MAX_RECIPIENTS: Final = 1000
MAX_DAYS: Final = 36_500
MAX_NOTE_CHARACTERS: Final = 500


def routes(site: Site) -> list[Route]:
    """The routes of the list and of its forms."""
    pages = SuppressionPages(site)
    return [
        site.get(PATH, pages.show),
        site.post(f"{PATH}/look-up", pages.look_up, title="Look up a recipient"),
        site.post(f"{PATH}/add", pages.add, title="Suppress recipients"),
        site.post(f"{PATH}/remove", pages.remove, title="Let recipients get emails again"),
    ]


@dataclass(frozen=True, slots=True)
class SuppressionPages:
    """The handlers of the page Suppressions.

    Addresses are only in the bodies of requests, never in URLs, which proxies write to their logs.
    """

    site: Site

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with the entries of a tenant, newest first."""
        return await self._page(request, visitor, fields.parameter(request, "tenant"))

    async def look_up(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """The page with the entries that suppress an address or a domain."""
        tenant = form.get("tenant", "")
        try:
            (recipient,) = _recipients(form.get("recipient", ""))
            tenant_id = fields.tenant_of(visitor, tenant)
        except ValueError:
            mistake = Mistake("Look up one address or domain at a time.")
            return await self._page(request, visitor, tenant, form=form, mistake=mistake)
        except Mistake as mistake:
            return await self._page(request, visitor, tenant, form=form, mistake=mistake)
        async with self.site.session() as session:
            found = await suppressions.find(session, tenant_id, recipient)
        looked_up = {"recipient": recipient, "entries": found}
        return await self._page(request, visitor, tenant, form=form, looked_up=looked_up)

    async def add(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Suppresses recipients."""
        tenant = form.get("tenant", "")
        try:
            tenant_id, recipients = fields.tenant_of(visitor, tenant), _recipients(form.get("recipients", ""))
            days = fields.number_of(form, "days", "The number of days", most=MAX_DAYS, is_whole=True)
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await self._page(request, visitor, tenant, form=form, mistake=mistake)
        async with self.site.session() as session:
            added = await suppressions.add(
                session,
                tenant_id,
                recipients,
                act,
                note=form.get("note", "")[:MAX_NOTE_CHARACTERS] or None,
                expires_at=datetime.now(UTC) + timedelta(days=days) if days else None,
            )
        return self.site.see_other(PATH, tenant=tenant, added=added, unchanged=len(recipients) - added or None)

    async def remove(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Removes the entries of recipients."""
        tenant = form.get("tenant", "")
        try:
            tenant_id, recipients = fields.tenant_of(visitor, tenant), _recipients(form.get("recipient", ""))
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await self._page(request, visitor, tenant, form=form, mistake=mistake)
        async with self.site.session() as session:
            removed = await suppressions.remove(session, tenant_id, recipients, act)
        return self.site.see_other(PATH, tenant=tenant, removed=removed)

    async def _page(
        self,
        request: Request,
        visitor: Visitor,
        tenant: str,
        *,
        form: Mapping[str, str] | None = None,
        mistake: Mistake | None = None,
        looked_up: Mapping[str, Any] | None = None,
    ) -> Response:
        before, since, kind = fields.cursor_of(request), None, _kind(fields.parameter(request, "kind"))
        tenant_id = None
        try:
            tenant_id = fields.tenant_of(visitor, tenant)
            since = fields.since_of(fields.parameter(request, "since"))
        except Mistake as found:
            mistake = mistake or found
        page = None
        if tenant_id is not None:
            async with self.site.session() as session:
                try:
                    page = await suppressions.list_entries(
                        session, tenant_id, reason=kind, since=since, before=before, limit=fields.PAGE_ROWS
                    )
                except ValueError:
                    raise fields.wrong_cursor() from None
        return await self.site.page(
            request,
            visitor,
            "suppressions.html",
            status=200 if mistake is None else 400,
            tenant=tenant_id or tenant,
            page=page,
            kinds=list(SuppressionReason),
            kind=kind,
            since=fields.parameter(request, "since"),
            is_first=before is None,
            given=form or {},
            mistake=mistake,
            looked_up=looked_up,
            done={name: fields.counted_parameter(request, name) for name in ("added", "unchanged", "removed")},
            now=datetime.now(UTC),
        )


def _kind(text: str) -> SuppressionReason | None:
    return SuppressionReason(text) if text in tuple(SuppressionReason) else None


def _recipients(text: str) -> list[Recipient]:
    """The addresses and domains of a text, one per line or separated by commas."""
    parts = [part for line in text.splitlines() for part in line.split(",") if part.strip()]
    if not 1 <= len(parts) <= MAX_RECIPIENTS:
        raise Mistake(f"Give 1 to {MAX_RECIPIENTS:,} addresses or domains, one per line.")
    found = []
    for number, part in enumerate(parts, 1):
        try:
            found.append(Recipient.parse(part))
        except InvalidEmail as error:
            where = f"Recipient {number}" if len(parts) > 1 else "The recipient"
            raise Mistake(f"{where}: the {error.field} {error.reason}.") from None
    return found
