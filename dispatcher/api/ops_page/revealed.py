"""The parts of an email's content after its reveal: the HTML in a frame, the source, and the attachments.

The page of the reveal, which the audit log has recorded, links to them. A link works for some minutes, for the session
that revealed the content.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page.captured import IN_FRAME, as_file
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.store.emails import find_email
from dispatcher.store.leases import read_content

VALID_SECONDS: Final = 600


def path_of(site: Site, request: Request, email_id: UUID) -> str:
    """The path below which the parts of a revealed email are."""
    until = int(time.time()) + VALID_SECONDS
    return f"/emails/{email_id}/revealed/{until}-{site.sessions.seal(request, f'{email_id} {until}')}"


def routes(site: Site) -> list[Route]:
    pages = _RevealedPages(site)
    below = "/emails/{email_id:uuid}/revealed/{seal}"
    return [
        site.get(f"{below}/html", pages.show_html),
        site.get(f"{below}/source.eml", pages.download_source),
        site.get(f"{below}/attachments/{{number:int}}", pages.download_attachment),
    ]


@dataclass(frozen=True, slots=True)
class _RevealedPages:
    site: Site

    async def show_html(self, request: Request, visitor: Visitor) -> Response:
        email = await self._email(request, visitor)
        if email.html is None:
            raise not_found("HTML of this email")
        return Response(email.html.encode("utf-8", "replace"), headers=IN_FRAME, media_type="text/html; charset=utf-8")

    async def download_source(self, request: Request, visitor: Visitor) -> Response:
        """The email as an SMTP server would get it. Bcc is not in it."""
        from dispatcher.transport.mime import render

        email = await self._email(request, visitor)
        if email.template_id is not None:  # the provider fills it in
            raise not_found("source of this email")
        return as_file(render(email).content, f"{email.email_id}.eml")

    async def download_attachment(self, request: Request, visitor: Visitor) -> Response:
        email, number = await self._email(request, visitor), request.path_params["number"]
        if number >= len(email.attachments):
            raise not_found("attachment")
        return as_file(email.attachments[number].content, email.attachments[number].filename)

    async def _email(self, request: Request, visitor: Visitor) -> OutgoingEmail:
        """The email in the path. Raises PageError if the visitor may not see it, or did not reveal it just now."""
        require_operate(visitor)
        email_id: UUID = request.path_params["email_id"]
        until, _, seal = request.path_params["seal"].partition("-")
        wanted = self.site.sessions.seal(request, f"{email_id} {until}")
        is_sealed = wanted is not None and compare_digest(seal.encode(), wanted.encode())
        if not is_sealed or int(until) < time.time():
            raise PageError(404, "The content is no longer revealed.", "Go back to the email, and reveal it again.")
        async with self.site.session() as session:
            is_own = await find_email(session, email_id, tenant_id=visitor.tenant_id) is not None
            email = await read_content(session, email_id) if is_own else None
        if email is None:
            raise not_found("content of an email")
        return email
