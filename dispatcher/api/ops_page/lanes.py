"""The page Lanes and tenants: shares, policies, senders, ceilings, due emails.

Only for visitors who see all tenants.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions import tenants
from dispatcher.api.ops_page import face, fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.controls import MAX_LIMIT, MIN_LIMIT
from dispatcher.domain.status import OnUncertain
from dispatcher.ops import lanes
from dispatcher.ops.acts import Act
from dispatcher.ops.cached import Cached
from dispatcher.store.connections import AsyncSession

PATH: Final = "/lanes"
DUE_SECONDS: Final = 1.0
DONE: Final = {
    "lane": "The lane is changed. All hosts apply the change within two seconds.",
    "lane-unset": "The lane follows the hosts' settings again.",
}


def routes(site: Site) -> list[Route]:
    """The routes of the page and of its forms."""
    pages = LanePages(site, Cached(lanes.count_due, DUE_SECONDS))
    return [
        site.get(PATH, pages.show),
        site.post(f"{PATH}/set", pages.set_lane, title="Change a lane"),
        site.post(f"{PATH}/unset", pages.unset_lane, title="Reset a lane"),
        *face.forms(site, tenants.ACTIONS, pages.render, PATH),
    ]


@dataclass(frozen=True, slots=True)
class LanePages:
    """The handlers of the page Lanes and tenants."""

    site: Site
    due: Cached[list[lanes.Due]]

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with lanes, senders, tenants, and the number of due emails."""
        return await self.render(request, visitor)

    async def set_lane(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Sets a lane's weight and policy. An empty field changes nothing."""

        async def change(session: AsyncSession, act: Act) -> None:
            values = _policy(form)
            await lanes.set_policy(session, self._lane(form), values, act, self.site.settings)

        return await self._change(request, visitor, form, change, "lane")

    async def unset_lane(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Resets a lane: deletes its weight and its policy."""

        async def change(session: AsyncSession, act: Act) -> None:
            await lanes.unset_policy(session, self._lane(form), act)

        return await self._change(request, visitor, form, change, "lane-unset")

    async def _change(
        self,
        request: Request,
        visitor: Visitor,
        form: Form,
        change: Callable[[AsyncSession, Act], Awaitable[None]],
        done: str,
    ) -> Response:
        fields.all_tenants_only(visitor)
        try:
            act = fields.act_of(visitor, form)
            async with self.site.session() as session:
                await change(session, act)
        except Mistake as mistake:
            return await self.render(request, visitor, form=form, mistake=mistake)
        return self.site.see_other(PATH, done=done)

    async def render(
        self,
        request: Request,
        visitor: Visitor,
        *,
        form: Form | None = None,
        mistake: Mistake | None = None,
        secret: str | None = None,
    ) -> Response:
        """The page, with a mistake in one of its forms if there is one."""
        del secret  # no action on this page has one
        fields.all_tenants_only(visitor)
        async with self.site.session() as session:
            controls = await lanes.find_controls(session)
            rules = await lanes.list_rules(session)
        return await self.site.page(
            request,
            visitor,
            "lanes.html",
            status=200 if mistake is None else 400,
            shares=lanes.shares(controls, self.site.settings),
            limits=list(controls.tenants.values()),
            controls=controls,
            rules=rules,
            due=await self.due.get(self.site.session),
            most_due=lanes.MOST_DUE,
            most_pairs=lanes.MOST_DUE_TENANTS,
            policies=list(OnUncertain),
            given=form or {},
            mistake=mistake,
            done=DONE.get(fields.parameter(request, "done")) or face.done(request, tenants.ACTIONS),
            tenants=tenants,
        )

    def _lane(self, form: Mapping[str, str]) -> str:
        lane = form.get("lane", "")
        if lane not in self.site.settings.lanes:
            known = ", ".join(self.site.settings.lanes)
            raise PageError(404, "There is no such lane.", f"DISPATCHER_LANES has: {known}.")
        return lane


def _policy(form: Mapping[str, str]) -> dict[str, Any]:
    attempts = fields.number_of(form, "max_attempts", "Attempts", most=lanes.MAX_ATTEMPTS, is_whole=True)
    is_off = form.get("redeliver_for", "").strip() == "off"
    values = {
        "weight": fields.number_of(form, "weight", "The weight", least=MIN_LIMIT, most=MAX_LIMIT),
        "on_uncertain": form.get("on_uncertain") or None,
        "max_attempts": None if attempts is None else int(attempts),
        "redeliver_seconds": 0.0
        if is_off
        else fields.length_of(form, "redeliver_for", "Redelivery", most=lanes.MAX_REDELIVER_SECONDS),
    }
    if values["on_uncertain"] not in (None, *OnUncertain):
        raise Mistake(f"“If uncertain” must be one of: {', '.join(OnUncertain)}.")
    _require_some(values)
    return values


def _require_some(values: Mapping[str, object]) -> None:
    if all(value is None for value in values.values()):
        raise Mistake("Nothing was changed: all fields were empty.")
