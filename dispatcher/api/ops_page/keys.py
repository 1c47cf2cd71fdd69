"""The page Keys: lists and revokes the keys of the HTTP API. Keys are created on the command line.

If the page could create keys, an attacker with a stolen session could create a key of any tenant and scope, and use the
key after the session has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.keys import ListKeys, RevokeKey
from dispatcher.api.ops_page import face, fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.api_key import Key, shown

PATH: Final = "/keys"


def routes(site: Site) -> list[Route]:
    """The routes of the list, of one key, and of the form that revokes it. Only for visitors who see all tenants."""
    pages = KeyPages(site)
    return [
        site.get(PATH, pages.show),
        site.get(f"{PATH}/{{key_id}}", pages.show_one),
        *face.forms(site, [RevokeKey], pages.show_one, f"{PATH}/{{key_id}}"),
    ]


@dataclass(frozen=True, slots=True)
class KeyPages:
    """The handlers of the page Keys, and of the page of one key."""

    site: Site

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with the keys, oldest first."""
        page, filters, mistake = await face.listed(self.site, ListKeys, request, visitor)
        values = {"listing": ListKeys, "page": page, "filters": filters, "mistake": mistake}
        return await self.site.page(request, visitor, "keys.html", status=400 if mistake else 200, **values)

    async def show_one(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Form | None = None,
        mistake: Mistake | None = None,
        secret: str | None = None,
    ) -> Response:
        """The page of one key, with the form that revokes it."""
        del secret
        fields.all_tenants_only(visitor)
        wanted = face.value(request, form, "key_id")
        keys: list[Key] = await face.rows(self.site, ListKeys(with_revoked=True), visitor)
        key = next((each for each in keys if each.key_id == wanted), None)
        if key is None:
            raise not_found("key")
        return await self.site.page(
            request,
            visitor,
            "key.html",
            status=200 if mistake is None else 400,
            key=key,
            is_own=key.key_id == shown(visitor.key_id),
            is_last=all(each is key or each.revoked_at is not None for each in keys),
            given=form or {},
            mistake=mistake,
            done=face.done(request, [RevokeKey]),
        )
