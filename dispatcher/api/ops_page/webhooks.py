"""The pages Webhooks: the state of each webhook, and what an operator may do with it. Visitors of one tenant see and
change only its webhooks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions import webhooks
from dispatcher.actions.webhooks import AddWebhook, FindTarget, ListRefused, RemoveWebhook, ShowWebhook
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.event import TYPES
from dispatcher.ops.webhooks import TestResult, post_test

PATH: Final = "/webhooks"
_REFUSED: Final = 20
"""How many refused events the page of a webhook shows."""


def routes(site: Site) -> list[Route]:
    async def show(request: Request, visitor: Visitor, posted: face.Posted = face.NOTHING) -> Response:
        return await face.list_page(
            site, request, visitor, "webhooks.html", webhooks.ACTIONS, posted, adding=AddWebhook
        )

    async def show_one(
        request: Request, visitor: Visitor, posted: face.Posted = face.NOTHING, tested: TestResult | None = None
    ) -> Response:
        """The page of one webhook; the list, if a form names no webhook that the visitor may see."""
        try:
            webhook = await face.one(site, ShowWebhook, request, visitor, posted.form)
        except PageError:
            if posted.mistake is None:
                raise
            return await show(request, visitor, face.Posted(mistake=posted.mistake))
        refused = await face.rows(site, ListRefused(webhook_id=webhook.id, limit=_REFUSED), visitor)
        values = {"webhook": webhook, "types": len(TYPES), "tested": tested, "now": datetime.now(UTC)}
        values |= {"refused": refused.rows, "listing": ListRefused}
        return await face.shown(site, request, visitor, "webhook.html", webhooks.ACTIONS, posted, **values)

    async def test(request: Request, visitor: Visitor, _form: Form) -> Response:
        """Posts a test event to a webhook. Holds no database session while the receiver answers."""
        target = await face.one(site, FindTarget, request, visitor)
        return await show_one(request, visitor, tested=await post_test(target, site.settings))

    one = f"{PATH}/{{webhook_id}}"
    changes = [each for each in webhooks.ACTIONS if each not in (AddWebhook, RemoveWebhook)]
    return [
        site.get(PATH, show),
        site.get(one, show_one),
        site.post(f"{one}/test", test, title="Test a webhook"),
        *face.forms(site, [AddWebhook], show, PATH),
        *face.forms(site, [RemoveWebhook], show_one, PATH),
        *face.forms(site, changes, show_one, one),
    ]
