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

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.api_key import shown
from dispatcher.ops import api_keys

PATH: Final = "/keys"


def routes(site: Site) -> list[Route]:
    """The routes of the list, of one key, and of the form that revokes it. Only for visitors who see all tenants."""
    pages = KeyPages(site)
    return [
        site.get(PATH, pages.show),
        site.get(f"{PATH}/{{key_id}}", pages.ask),
        site.post(f"{PATH}/{{key_id}}/revoke", pages.revoke, title="Revoke a key"),
    ]


@dataclass(frozen=True, slots=True)
class KeyPages:
    """The handlers of the page Keys, and of the page of one key."""

    site: Site

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with all keys, oldest first."""
        fields.all_tenants_only(visitor)
        with_revoked = fields.parameter(request, "revoked") == "yes"
        async with self.site.session() as session:
            found = await api_keys.list_keys(session)
        return await self.site.page(
            request,
            visitor,
            "keys.html",
            keys=[key for key in found if with_revoked or key.revoked_at is None],
            revoked=sum(key.revoked_at is not None for key in found),
            with_revoked=with_revoked,
            shown=shown,
            done="The key is revoked." if fields.parameter(request, "done") == "revoked" else None,
        )

    async def ask(self, request: Request, visitor: Visitor) -> Response:
        """The page of one key, with the form that revokes it."""
        return await self._page(request, visitor)

    async def revoke(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Revokes a key."""
        fields.all_tenants_only(visitor)
        try:
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await self._page(request, visitor, form=form, mistake=mistake)
        async with self.site.session() as session:
            await api_keys.revoke(session, request.path_params["key_id"], act)
        return self.site.see_other(PATH, done="revoked", revoked="yes")

    async def _page(
        self, request: Request, visitor: Visitor, *, form: Form | None = None, mistake: Mistake | None = None
    ) -> Response:
        fields.all_tenants_only(visitor)
        wanted = request.path_params["key_id"].removeprefix("ed_")
        async with self.site.session() as session:
            found = await api_keys.list_keys(session)
        key = next((each for each in found if each.key_id == wanted), None)
        if key is None:
            raise not_found("key")
        return await self.site.page(
            request,
            visitor,
            "key.html",
            status=200 if mistake is None else 400,
            key=key,
            shown=shown,
            is_own=key.key_id == visitor.key_id,
            is_last=all(each is key or each.revoked_at is not None for each in found),
            given=form or {},
            mistake=mistake,
        )
