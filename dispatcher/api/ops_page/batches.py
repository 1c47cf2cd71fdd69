"""The pages of changes of many emails: the dry run of a filter or of chosen emails, and what the change did.

A change may be repeated: it leaves out the emails that are already as asked. So a page changes a limited number of
emails, says how many are left, and offers to go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Mistakes, path_of
from dispatcher.actions.batch import Batch, Judged
from dispatcher.actions.dlq import DiscardDead
from dispatcher.actions.held import Confirm, Release
from dispatcher.actions.runner import preview, run_batch, select
from dispatcher.actions.unsent import Cancel, Reschedule
from dispatcher.api.ops_page import face, fields
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.domain.scrub import scrub

BATCHES: Final[tuple[type[Batch], ...]] = (DiscardDead, Confirm, Release, Cancel, Reschedule)
MOST: Final = 5_000
"""How many emails one request changes: some seconds."""
_SHOWN: Final = 20
"""How many of the emails that were not changed the page names."""


def routes(site: Site) -> list[Route]:
    found = []
    for action in BATCHES:
        pages = _BatchPages(site, action)
        title = f"{action.verb().capitalize()} emails"
        found += [site.get(path_of(action), pages.ask), site.post(path_of(action), pages.change, title=title)]
    return found


@dataclass(frozen=True, slots=True)
class _BatchPages:
    site: Site
    action: type[Batch]

    async def ask(self, request: Request, visitor: Visitor) -> Response:
        """The dry run: how many emails are selected, and a form that asks for the reason."""
        require_operate(visitor)
        return await self._dry_run(request, visitor, fields.chosen(request))

    async def change(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Changes at most MOST of the emails, unless more are selected now than the dry run showed."""
        texts = self._typed(form) | fields.typed(form, (*self.action.one_of, "reason"))
        if "reason" in texts:
            texts["reason"] = scrub(texts["reason"])
        try:
            asked = face.asked(self.action, request, visitor, texts)
        except Mistakes as error:
            return await self._dry_run(request, visitor, form, face.words_of(error), 400)
        judged: list[Judged] = []
        async with self.site.session() as session:
            groups = await preview(session, asked, most=MOST + 1)
            count = sum(each.emails for each in groups)
            if (shown := fields.counted(form.get("shown", ""))) is None or min(count, MOST) > shown:
                words = f"The filter now selects {count:,} emails. Check the new dry run, and confirm."
                return await self._dry_run(request, visitor, form, words, 409)
            ids = await select(session, asked, most=MOST)
            async for batch in run_batch(session, asked, face.who(visitor), ids, self.site.settings):
                judged += batch
        self.site.forget()
        outcome = self.action.outcome(groups, len(set(asked.email_ids or ())), judged, most=MOST)
        return await self._page(request, visitor, form, outcome=outcome, shown_unchanged=_SHOWN)

    async def _dry_run(
        self,
        request: Request,
        visitor: Visitor,
        given: Mapping[str, str],
        mistake: str | None = None,
        status: int = 200,
    ) -> Response:
        # A dry run needs no reason and no time.
        free = {"reason": "a dry run", **dict.fromkeys(self.action.one_of[-1:], "true")}
        try:
            asked = face.asked(self.action, request, visitor, self._typed(given) | free)
        except Mistakes as error:
            raise PageError(400, face.words_of(error), "Go back, and correct the filter.") from None
        async with self.site.session() as session:
            groups = await preview(session, asked, most=MOST + 1)
            lines = await self.site.lines(session, [email_id for each in groups for email_id in each.ids])
        return await self._page(request, visitor, given, groups=groups, lines=lines, mistake=mistake, status=status)

    async def _page(
        self, request: Request, visitor: Visitor, given: Mapping[str, str], *, status: int = 200, **values: Any
    ) -> Response:
        back = {Confirm: "/held", Release: "/held", DiscardDead: "/dead-letters"}.get(self.action, "/emails")
        filters = {name: text for name, text in self._typed(given).items() if name != "email_ids"}
        known: dict[str, Any] = {
            "back": self.site.url(back, **filters),
            "groups": [],
            "lines": [],
            "outcome": None,
            "mistake": None,
            "most": MOST,
        }
        return await self.site.page(
            request,
            visitor,
            "batch.html",
            status=status,
            action=self.action,
            typed=self._typed(given),
            given=given,
            **known | values,
        )

    def _typed(self, given: Mapping[str, str]) -> dict[str, str]:
        return fields.typed(given, (*self.action.filters, "tenant_id", "email_ids"))
