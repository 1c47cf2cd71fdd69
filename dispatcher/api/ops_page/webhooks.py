"""The pages Webhooks: the state of each webhook, and what an operator may do with it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions import webhooks
from dispatcher.actions.webhooks import WEBHOOK_ID, AddWebhook, FindTarget, ListWebhooks, RemoveWebhook, ShowWebhook
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.event import TYPES
from dispatcher.domain.kinds import Wrong
from dispatcher.ops.webhooks import TestResult, post_test

PATH: Final = "/webhooks"


def routes(site: Site) -> list[Route]:
    """The routes of the list, of the page of one webhook, and of its forms."""
    pages = WebhookPages(site)
    one = f"{PATH}/{{webhook_id}}"
    changes = [each for each in webhooks.ACTIONS if each not in (AddWebhook, RemoveWebhook)]
    return [
        site.get(PATH, pages.show),
        site.get(one, pages.show_one),
        site.post(f"{one}/test", pages.test, title="Test a webhook"),
        *face.forms(site, [AddWebhook], pages.show, PATH),
        *face.forms(site, [RemoveWebhook], pages.show_one, PATH),
        *face.forms(site, changes, pages.show_one, one),
    ]


@dataclass(frozen=True, slots=True)
class WebhookPages:
    """The handlers of the pages Webhooks. Visitors of one tenant see and change only its webhooks."""

    site: Site

    async def show(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Form | None = None,
        mistake: Mistake | None = None,
        secret: str | None = None,
    ) -> Response:
        """The page with all webhooks."""
        page, filters, wrong = await face.listed(self.site, ListWebhooks, request, visitor)
        mistake = mistake or wrong
        return await self.site.page(
            request,
            visitor,
            "webhooks.html",
            status=200 if mistake is None else 400,
            listing=ListWebhooks,
            adding=AddWebhook,
            webhooks=page.rows,
            filters=filters,
            given=(form or {}) if secret is None else {},
            mistake=mistake,
            secret=secret,
            done=face.done(request, webhooks.ACTIONS),
        )

    async def show_one(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Form | None = None,
        mistake: Mistake | None = None,
        secret: str | None = None,
        tested: TestResult | None = None,
    ) -> Response:
        """The page of one webhook; the list, if a form names no webhook that the visitor may see."""
        try:
            webhook = await face.rows(self.site, ShowWebhook(webhook_id=_number(request, form)), visitor)
        except PageError:
            if mistake is None:
                raise
            return await self.show(request, visitor, mistake=mistake)
        return await self.site.page(
            request,
            visitor,
            "webhook.html",
            status=200 if mistake is None else 400,
            webhook=webhook,
            types=len(TYPES),
            given=(form or {}) if secret is None else {},
            mistake=mistake,
            tested=tested,
            secret=secret,
            done=face.done(request, webhooks.ACTIONS),
            now=datetime.now(UTC),
        )

    async def test(self, request: Request, visitor: Visitor, _form: Form) -> Response:
        """Posts a test event to a webhook. Holds no database session while the receiver answers."""
        target = await face.rows(self.site, FindTarget(webhook_id=_number(request)), visitor)
        return await self.show_one(request, visitor, tested=await post_test(target, self.site.settings))


def _number(request: Request, form: Form | None = None) -> int:
    """The webhook's id, in the path or in a form."""
    try:
        return WEBHOOK_ID.of_text(face.value(request, form, "webhook_id"))
    except Wrong:
        raise not_found("webhook") from None
