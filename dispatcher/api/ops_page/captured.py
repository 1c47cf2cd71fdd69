"""The page Captured, for development: messages that a capture provider wrote to a folder instead of delivering them.

The audit log does not record what operators do here, because no recipient gets these messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page.fields import counted, parameter
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import SECURITY_HEADERS, Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.domain.email import Email
from dispatcher.ops import captured
from dispatcher.ops.captured import CapturedEmail, CapturedFilter, CapturedName, parse_name
from dispatcher.producers import enqueue_async

T = TypeVar("T")

ROWS: Final = 50
MAX_SEARCH_CHARACTERS: Final = 200
DONE: Final = {
    "deleted": "The captured email is deleted.",
    "all": "All captured emails are deleted.",
    "sent": "The test email is enqueued. It appears here when `dispatcher run` has sent it.",
}
VIEWS: Final = ("html", "text", "checks", "headers", "source")
MAX_TEXT_CHARACTERS: Final = 256 * 1024
FRAMING: Final = {"Content-Security-Policy": SECURITY_HEADERS["Content-Security-Policy"] + "; frame-src 'self'"}
"""The headers of the page that shows an email's HTML in a frame. The frame may load only pages of this site."""
IN_FRAME: Final = {
    "Content-Security-Policy": (
        "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
}
"""The headers of an email's HTML in the frame. The HTML runs no script, loads nothing, sends no form, and has an origin
of its own."""
WITH_IMAGES: Final = {
    **IN_FRAME,
    "Content-Security-Policy": IN_FRAME["Content-Security-Policy"].replace(
        "img-src data:", "img-src data: https: http:"
    ),
}
AS_FILE: Final = {"Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'"}


def routes(site: Site) -> list[Route]:
    pages = _CapturedPages(site)
    return [
        site.get("/captured", pages.show_list),
        site.get("/captured/{name}", pages.show_email),
        site.get("/captured/{name}/html", pages.show_html),
        site.get("/captured/{name}/source.eml", pages.download_source),
        site.get("/captured/{name}/attachments/{number}", pages.download_attachment),
        site.post("/captured/delete", pages.delete, title="Delete all captured emails"),
        site.post("/captured/send", pages.send_test, title="Send a test email"),
        site.post("/captured/{name}/delete", pages.delete, title="Delete a captured email"),
    ]


@dataclass(frozen=True, slots=True)
class _CapturedPages:
    site: Site

    async def show_list(self, request: Request, visitor: Visitor) -> Response:
        folders, before = self._folders(visitor), request.query_params.get("before", "")
        wanted = CapturedFilter(text=parameter(request, "q")[:MAX_SEARCH_CHARACTERS])
        if before.isascii() and before.isdigit() and len(before) <= 20:
            wanted = replace(wanted, before_ns=int(before))
        rows, cursor = await _in_thread(partial(captured.find_captured, folders, wanted, limit=ROWS))
        return await self.site.page(
            request,
            visitor,
            "captured.html",
            rows=rows,
            cursor=None if cursor is None else cursor.captured_ns,
            is_first=not before,
            folders=folders,
            q=wanted.text,
            may_send=captured.delivers_nothing(self.site.settings),
            done=DONE.get(parameter(request, "done")),
        )

    async def show_email(self, request: Request, visitor: Visitor) -> Response:
        email = await self._email(request, visitor)
        await _in_thread(partial(captured.mark_read, self._folders(visitor), email.name))
        message = email.message
        has = {"html": message.html is not None, "text": message.text is not None, "source": True}
        views = [view for view in VIEWS if has.get(view, not email.name.is_sms)]
        view = request.query_params.get("view", "")
        shown = view if view in views else views[0]
        text = message.text if shown == "text" else email.source.decode("utf-8", "replace")
        response = await self.site.page(
            request,
            visitor,
            "captured_email.html",
            email=email,
            message=message,
            views=views,
            view=shown,
            warnings=len(message.findings) + sum(bool(link.problems) for link in message.links),
            loads_images=parameter(request, "images") == "once",
            text=(text or "")[:MAX_TEXT_CHARACTERS],
            characters_left=max(0, len(text or "") - MAX_TEXT_CHARACTERS),
        )
        response.headers.update(FRAMING)
        return response

    async def show_html(self, request: Request, visitor: Visitor) -> Response:
        email = await self._email(request, visitor)
        if email.framed is None:
            raise PageError(404, "This captured email has no HTML.", "Look at its text or its source.")
        headers = WITH_IMAGES if parameter(request, "images") == "once" else IN_FRAME
        return Response(email.framed.encode(), headers=headers, media_type="text/html; charset=utf-8")

    async def download_source(self, request: Request, visitor: Visitor) -> Response:
        email = await self._email(request, visitor)
        return as_file(email.source, f"{email.name.email_id}.{'json' if email.name.is_sms else 'eml'}")

    async def download_attachment(self, request: Request, visitor: Visitor) -> Response:
        email, number = await self._email(request, visitor), counted(request.path_params["number"])
        found = next((each for each in email.message.attachments if each.number == number), None)
        if found is None:
            raise not_found("attachment")
        return as_file(found.content, found.filename)

    async def delete(self, request: Request, visitor: Visitor, _form: Form) -> Response:
        """Deletes the email in the path; all, if the path has none."""
        folders, name = self._folders(visitor), _name(request) if "name" in request.path_params else None
        await _in_thread(partial(captured.delete_captured, folders, name))
        return self.site.see_other("/captured", done="all" if name is None else "deleted")

    async def send_test(self, _request: Request, visitor: Visitor, form: Form) -> Response:
        self._folders(visitor)
        if not captured.delivers_nothing(self.site.settings):
            raise PageError(409, "A provider here delivers emails.", "To send a test, run `dispatcher enqueue`.")
        email = Email(
            message_key=f"captured-test-{uuid4()}",
            sender="Test <test@example.com>",
            to=form.get("to", ""),
            subject=form.get("subject", ""),
            text="This is a test: https://example.com/",
            html='<p>This is a <strong>test</strong>.</p>\n<p><a href="https://example.com/">A link</a></p>\n',
        )
        async with self.site.session() as session:
            await enqueue_async(session, email)
        return self.site.see_other("/captured", done="sent")

    def _folders(self, visitor: Visitor) -> list[Path]:
        """The Maildirs. Raises PageError if there is none, or if the visitor does not see all tenants or may only
        read."""
        folders = captured.folders_of(self.site.settings)
        if folders is None or visitor.tenant_id is not None:
            raise PageError(404, "There is no page at this address.", "Use the navigation.")
        require_operate(visitor)
        return folders

    async def _email(self, request: Request, visitor: Visitor) -> CapturedEmail:
        folders, name = self._folders(visitor), _name(request)
        email = await _in_thread(partial(captured.read_captured, folders, name))
        if email is None:
            raise not_found("captured email")
        return email


def _name(request: Request) -> CapturedName:
    name = parse_name(request.path_params["name"])
    if name is None:
        raise not_found("captured email")
    return name


async def _in_thread(read: Callable[[], T]) -> T:
    """Reads files in a thread, so that the API's other requests do not wait."""
    try:
        return await asyncio.to_thread(read)
    except OSError as error:
        raise PageError(
            503,
            f"The folder of captured messages cannot be read: {error.strerror}.",
            "Run `dispatcher api` as the user that runs `dispatcher run`, on the same host.",
        ) from error


def as_file(content: bytes, filename: str) -> Response:
    """A response that makes browsers save the file and not show it, whatever its type."""
    plain = "".join(each if each.isascii() and each.isprintable() and each not in '"%?' else "_" for each in filename)
    disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"
    headers = {**AS_FILE, "Content-Disposition": disposition}
    return Response(content, headers=headers, media_type="application/octet-stream")
