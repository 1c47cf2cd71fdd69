"""The page Pauses: shows what is paused, by whom, why and until when, and for which providers workers wait. Begins and
ends pauses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.controls import PauseScope
from dispatcher.ops import pausing
from dispatcher.store.providers import find_troubles

PATH: Final = "/pauses"
DONE: Final = {
    "paused": "Paused. All hosts apply the change within two seconds.",
    "resumed": "Resumed. All hosts apply the change within two seconds.",
}


def routes(site: Site) -> list[Route]:
    """The routes of the list and of its forms."""
    pages = PausePages(site)
    return [
        site.get(PATH, pages.show),
        site.post(f"{PATH}/pause", pages.pause, title="Pause sending"),
        site.post(f"{PATH}/resume", pages.resume, title="Resume sending"),
    ]


@dataclass(frozen=True, slots=True)
class PausePages:
    """The handlers of the page Pauses. Visitors of one tenant see, begin and end only the pause of their tenant."""

    site: Site

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with all pauses."""
        return await self._page(request, visitor)

    async def pause(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Begins a pause, or changes its end and its reason."""
        try:
            scope, name = _target(visitor, form)
            name = _checked(self.site, scope, name)
            seconds = fields.length_of(form, "length", "“For”", most=pausing.MAX_SECONDS)
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await self._page(request, visitor, form=form, mistake=mistake)
        async with self.site.session() as session:
            await pausing.pause(session, scope, name, act, seconds=seconds)
        self.site.pauses.forget()
        return self.site.see_other(PATH, done="paused")

    async def resume(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Ends a pause."""
        try:
            scope, name = _target(visitor, form)
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await self._page(request, visitor, form=form, mistake=mistake)
        async with self.site.session() as session:
            await pausing.resume(session, scope, name, act)
        self.site.pauses.forget()
        return self.site.see_other(PATH, done="resumed")

    async def _page(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Mapping[str, str] | None = None,
        mistake: Mistake | None = None,
    ) -> Response:
        async with self.site.session() as session:
            found = await pausing.list_pauses(session)
            problems = await find_troubles(session) if visitor.tenant_id is None else []
        asked = {name: fields.parameter(request, name) for name in ("scope", "name")}
        return await self.site.page(
            request,
            visitor,
            "pauses.html",
            status=200 if mistake is None else 400,
            in_force=pausing.seen_by(found, visitor.tenant_id),
            problems=[each for each in problems if each.state != "half_open"],
            scopes=list(PauseScope),
            lanes=self.site.settings.lanes,
            providers=self.site.settings.providers,
            given=form or asked,
            mistake=mistake,
            done=DONE.get(fields.parameter(request, "done")),
        )


def _target(visitor: Visitor, form: Mapping[str, str]) -> tuple[PauseScope, str]:
    """What a form pauses or resumes.

    Raises:
        PageError: The visitor may not pause or resume this.
        Mistake: The form does not say whether to pause everything, a lane, a tenant or a provider.
    """
    text, name = form.get("scope", ""), form.get("name", "").strip()
    if text not in tuple(PauseScope):
        raise Mistake("Choose what to pause: everything, a lane, a tenant or a provider.")
    scope = PauseScope(text)
    if visitor.tenant_id is not None and (scope, name) != (PauseScope.TENANT, visitor.tenant_id):
        raise PageError(
            404, "Nothing that you can pause has this name.", "You can pause and resume only your own tenant."
        )
    return scope, "" if scope is PauseScope.ALL else name


def _checked(site: Site, scope: PauseScope, name: str) -> str:
    try:
        return pausing.check_target(scope, name, site.settings)
    except ValueError as error:
        raise Mistake(str(error)) from None
