"""The pages Webhooks: the state of each webhook, and what an operator may do with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
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
from dispatcher.domain.outgoing_event import TYPES
from dispatcher.ops import webhooks
from dispatcher.ops.acts import Act
from dispatcher.store.connections import AsyncSession
from dispatcher.store.webhooks import Webhook

PATH: Final = "/webhooks"
DONE: Final = {
    "enabled": "The webhook is active. Its waiting events are posted now.",
    "disabled": "The webhook is disabled. Its events wait.",
    "removed": "The webhook is removed.",
    "replayed": "The webhook gets the events again.",
}
"""What the page says after a form was processed, by the name of the result in the URL."""
Change = Callable[[AsyncSession, int, Act], Awaitable[None]]


def routes(site: Site) -> list[Route]:
    """The routes of the list, of the page of one webhook, and of its forms."""
    pages = WebhookPages(site)
    one = f"{PATH}/{{webhook_id}}"
    return [
        site.get(PATH, pages.show),
        site.get(one, pages.show_one),
        site.post(f"{one}/test", pages.test, title="Test a webhook"),
        site.post(f"{one}/enable", pages.enable, title="Enable a webhook"),
        site.post(f"{one}/disable", pages.disable, title="Disable a webhook"),
        site.post(f"{one}/remove", pages.remove, title="Remove a webhook"),
        site.post(f"{one}/rotate", pages.rotate, title="Give a webhook a new secret"),
        site.post(f"{one}/replay", pages.replay, title="Deliver events again"),
    ]


@dataclass(frozen=True, slots=True)
class WebhookPages:
    """The handlers of the pages Webhooks. Visitors of one tenant see and change only its webhooks."""

    site: Site

    async def show(self, request: Request, visitor: Visitor) -> Response:
        async with self.site.session() as session:
            found = await webhooks.list_webhooks(session, visitor.tenant_id)
        return await self.site.page(
            request,
            visitor,
            "webhooks.html",
            webhooks=found,
            types=len(TYPES),
            done=DONE.get(fields.parameter(request, "done")),
        )

    async def show_one(self, request: Request, visitor: Visitor) -> Response:
        return await self._page(request, visitor)

    async def test(self, request: Request, visitor: Visitor, _form: Form) -> Response:
        """Posts a test event to a webhook. Holds no database session while the receiver answers."""
        async with self.site.session() as session:
            webhook = await self._find(session, request, visitor)
            target = await webhooks.find_test_target(session, webhook.webhook_id)
        return await self._page(request, visitor, tested=await webhooks.post_test(target, self.site.settings))

    async def enable(self, request: Request, visitor: Visitor, form: Form) -> Response:
        return await self._change(request, visitor, form, webhooks.enable, "enabled")

    async def disable(self, request: Request, visitor: Visitor, form: Form) -> Response:
        return await self._change(request, visitor, form, webhooks.disable, "disabled")

    async def remove(self, request: Request, visitor: Visitor, form: Form) -> Response:
        return await self._change(request, visitor, form, webhooks.remove, "removed")

    async def replay(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Delivers again all events since the time in the form."""
        try:
            since = fields.since_of(form.get("since", "").strip() or "nothing")
        except Mistake as mistake:
            return await self._page(request, visitor, form=form, mistake=mistake)

        async def rewind(session: AsyncSession, webhook_id: int, act: Act) -> None:
            assert since is not None
            await webhooks.replay(session, webhook_id, since, act)

        return await self._change(request, visitor, form, rewind, "replayed")

    async def rotate(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Gives a webhook a new secret. Only the returned page shows the secret."""
        try:
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await self._page(request, visitor, form=form, mistake=mistake)
        async with self.site.session() as session:
            webhook = await self._find(session, request, visitor)
            secret = await webhooks.rotate(session, webhook.webhook_id, act)
        return await self._page(request, visitor, secret=secret)

    async def _change(self, request: Request, visitor: Visitor, form: Form, change: Change, done: str) -> Response:
        try:
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await self._page(request, visitor, form=form, mistake=mistake)
        async with self.site.session() as session:
            webhook = await self._find(session, request, visitor)
            await change(session, webhook.webhook_id, act)
        path = PATH if done == "removed" else f"{PATH}/{webhook.webhook_id}"
        return self.site.see_other(path, done=done)

    async def _page(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Form | None = None,
        mistake: Mistake | None = None,
        tested: webhooks.TestResult | None = None,
        secret: str | None = None,
    ) -> Response:
        async with self.site.session() as session:
            webhook = await self._find(session, request, visitor)
        return await self.site.page(
            request,
            visitor,
            "webhook.html",
            status=200 if mistake is None else 400,
            webhook=webhook,
            types=len(TYPES),
            given=form or {},
            mistake=mistake,
            tested=tested,
            secret=secret,
            done=DONE.get(fields.parameter(request, "done")),
            now=datetime.now(UTC),
        )

    async def _find(self, session: AsyncSession, request: Request, visitor: Visitor) -> Webhook:
        webhook_id = fields.number_in_path(request, "webhook_id", "webhook")
        found = await webhooks.find(session, webhook_id, visitor.tenant_id)
        if found is None:
            raise not_found("webhook")
        return found
