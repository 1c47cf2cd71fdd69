"""The page Captured, for development: messages that a capture provider wrote to a folder instead of delivering them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page.fields import counted
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import SECURITY_HEADERS, Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.ops.captured import CapturedEmail, list_captured, parse_name, read_captured
from dispatcher.providers.capture import NAME as CAPTURE
from dispatcher.providers.capture import CaptureSettings
from dispatcher.providers.sms_capture import NAME as SMS_CAPTURE
from dispatcher.providers.sms_capture import SmsCaptureSettings

T = TypeVar("T")

ROWS: Final = 50
VIEWS: Final = ("html", "text", "source")
MAX_TEXT_CHARACTERS: Final = 256 * 1024
FRAMING: Final = {
    "Content-Security-Policy": SECURITY_HEADERS["Content-Security-Policy"] + "; frame-src 'self'",
}
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
AS_FILE: Final = {
    "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
}


def routes(site: Site) -> list[Route]:
    """The routes of the list, of one email, of the email's HTML in a frame, and of its downloads."""

    async def show_list(request: Request, visitor: Visitor) -> Response:
        folders = _folders(site, visitor)
        text = request.query_params.get("before", "")
        before = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None
        found = await _in_thread(partial(list_captured, folders, limit=ROWS + 1, before_ns=before))
        rows = found[:ROWS]
        cursor = rows[-1].name.captured_ns if len(found) > ROWS else None
        return await site.page(
            request, visitor, "captured.html", rows=rows, cursor=cursor, is_first=before is None, folders=folders
        )

    async def show_email(request: Request, visitor: Visitor) -> Response:
        email = await _email(site, request, visitor)
        views = [view for view in VIEWS if getattr(email, view) is not None]
        view = request.query_params.get("view", "")
        shown = view if view in views else views[0]
        text = email.text if shown == "text" else email.source.decode("utf-8", "replace")
        response = await site.page(
            request,
            visitor,
            "captured_email.html",
            email=email,
            views=views,
            view=shown,
            text=(text or "")[:MAX_TEXT_CHARACTERS],
            characters_left=max(0, len(text or "") - MAX_TEXT_CHARACTERS),
        )
        response.headers.update(FRAMING)
        return response

    async def show_html(request: Request, visitor: Visitor) -> Response:
        email = await _email(site, request, visitor)
        if email.html is None:
            raise PageError(404, "This captured email has no HTML.", "Look at its text or its source.")
        return Response(email.html.encode("utf-8", "replace"), headers=IN_FRAME, media_type="text/html; charset=utf-8")

    async def download_source(request: Request, visitor: Visitor) -> Response:
        email = await _email(site, request, visitor)
        return as_file(email.source, f"{email.name.email_id}.{'json' if email.name.is_sms else 'eml'}")

    async def download_attachment(request: Request, visitor: Visitor) -> Response:
        email = await _email(site, request, visitor)
        number = counted(request.path_params["number"])
        found = next((each for each in email.attachments if each.number == number), None)
        if found is None:
            raise not_found("attachment")
        return as_file(found.content, found.filename)

    return [
        site.get("/captured", show_list),
        site.get("/captured/{name}", show_email),
        site.get("/captured/{name}/html", show_html),
        site.get("/captured/{name}/source.eml", download_source),
        site.get("/captured/{name}/attachments/{number}", download_attachment),
    ]


def _folders(site: Site, visitor: Visitor) -> list[Path]:
    """The Maildirs of the configured capture providers. One folder has the captured emails of all tenants.

    Raises:
        PageError: the visitor does not see all tenants or may only read, or no provider captures emails.
    """
    settings = site.settings
    found = {CAPTURE: settings.of(CaptureSettings).dir, SMS_CAPTURE: settings.of(SmsCaptureSettings).dir}
    if found.keys().isdisjoint(settings.providers) or visitor.tenant_id is not None:
        raise PageError(404, "There is no page at this address.", "Use the navigation.")
    require_operate(visitor)
    return [folder for name, folder in found.items() if name in settings.providers and folder is not None]


async def _email(site: Site, request: Request, visitor: Visitor) -> CapturedEmail:
    folders, name = _folders(site, visitor), parse_name(request.path_params["name"])
    email = None if name is None else await _in_thread(partial(read_captured, folders, name))
    if email is None:
        raise not_found("captured email")
    return email


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
