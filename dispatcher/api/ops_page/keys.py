"""The page Keys: lists and revokes the keys of the HTTP API. Keys are created on the command line.

If the page could create keys, an attacker with a stolen session could create a key of any tenant and scope, and use the
key after the session has ended.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.keys import ListKeys, RevokeKey
from dispatcher.api.ops_page import face, fields
from dispatcher.api.ops_page.page_errors import not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.api_key import Key, shown


def routes(site: Site) -> list[Route]:
    """The routes of the list, of one key, and of the form that revokes it. Only for visitors who see all tenants."""

    async def show_one(request: Request, visitor: Visitor, posted: face.Posted = face.NOTHING) -> Response:
        fields.all_tenants_only(visitor)
        wanted = face.value(request, posted.form, "key_id")
        keys: list[Key] = await face.rows(site, ListKeys(with_revoked=True), visitor)
        key = next((each for each in keys if each.key_id == wanted), None)
        if key is None:
            raise not_found("key")
        is_last = all(each is key or each.revoked_at is not None for each in keys)
        values = {"key": key, "is_own": key.key_id == shown(visitor.key_id), "is_last": is_last}
        return await face.shown(site, request, visitor, "key.html", [RevokeKey], posted, **values)

    return [
        *face.pages(site, "/keys", [ListKeys], "keys.html"),
        site.get("/keys/{key_id}", show_one),
        *face.forms(site, [RevokeKey], show_one, "/keys/{key_id}"),
    ]
