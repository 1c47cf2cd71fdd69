"""The parts of an email's content after its reveal: the HTML in a frame, the source, and the attachments.

The page of the reveal links to them. They are shown for some minutes to the operator whose reveal the audit log has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page.captured import IN_FRAME, as_file
from dispatcher.api.ops_page.fields import counted
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.ops.captured import with_images
from dispatcher.store.emails import find_email, was_revealed
from dispatcher.store.leases import read_content

VALID_SECONDS: Final = 600


def routes(site: Site) -> list[Route]:
    pages = _RevealedPages(site)
    below = "/emails/{email_id:uuid}/revealed"
    return [
        site.get(f"{below}/html", pages.show_html),
        site.get(f"{below}/source.eml", pages.download_source),
        site.get(f"{below}/attachments/{{number}}", pages.download_attachment),
    ]


@dataclass(frozen=True, slots=True)
class _RevealedPages:
    site: Site

    async def show_html(self, request: Request, visitor: Visitor) -> Response:
        email = await self._email(request, visitor)
        if email.html is None:
            raise not_found("HTML of this email")
        images = [(each.content_id, each.content_type, each.content) for each in email.attachments]
        html = with_images(email.html, images)
        return Response(html.encode("utf-8", "replace"), headers=IN_FRAME, media_type="text/html; charset=utf-8")

    async def download_source(self, request: Request, visitor: Visitor) -> Response:
        """The email as an SMTP server would get it. Bcc is not in it."""
        from dispatcher.transport.mime import render

        email = await self._email(request, visitor)
        if email.template_id is not None:  # the provider fills it in
            raise not_found("source of this email")
        return as_file(render(email).content, f"{email.email_id}.eml")

    async def download_attachment(self, request: Request, visitor: Visitor) -> Response:
        email, number = await self._email(request, visitor), counted(request.path_params["number"])
        if number is None or number >= len(email.attachments):
            raise not_found("attachment")
        return as_file(email.attachments[number].content, email.attachments[number].filename)

    async def _email(self, request: Request, visitor: Visitor) -> OutgoingEmail:
        """The email in the path. Raises PageError if the visitor may not see it, or did not reveal it just now."""
        require_operate(visitor)
        email_id: UUID = request.path_params["email_id"]
        async with self.site.session() as session:
            is_own = await find_email(session, email_id, tenant_id=visitor.tenant_id) is not None
            if is_own and not await was_revealed(session, email_id, actor=visitor.name, seconds=VALID_SECONDS):
                raise PageError(404, "The content is no longer revealed.", "Go back to the email, and reveal it again.")
            email = await read_content(session, email_id) if is_own else None
        if email is None:
            raise not_found("content of an email")
        return email
