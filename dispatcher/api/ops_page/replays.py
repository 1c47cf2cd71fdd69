"""The pages Replays: show the dry run of a filter, start a replay, show its progress, stop and resume it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.dead_filter import LABELS, DeadFilter, read_filter
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.ops import replaying
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import AN_OPERATOR
from dispatcher.store.connections import AsyncSession
from dispatcher.store.replays import Replay, ReplayState, count_replayed_by_status, list_replays

PATH: Final = "/replays"
CREATION_SECONDS: Final = 5.0
"""How long a visitor waits while a large replay is created. The creation continues afterwards."""
MOST_COUNTED: Final = 10_000
MAX_PER_SECOND: Final = 10_000


def routes(site: Site) -> list[Route]:
    """The routes of the pages and of their forms."""
    pages = ReplayPages(site)
    return [
        site.get(PATH, pages.show_all),
        site.get(f"{PATH}/new", pages.preview),
        site.post(f"{PATH}/new", pages.create, title="Replay emails"),
        site.get(f"{PATH}/{{replay_id}}", pages.show),
        site.post(f"{PATH}/{{replay_id}}/stop", pages.stop, title="Stop a replay"),
        site.post(f"{PATH}/{{replay_id}}/resume", pages.resume, title="Resume a replay"),
    ]


@dataclass(frozen=True, slots=True)
class ReplayPages:
    """The handlers of the pages Replays."""

    site: Site

    async def show_all(self, request: Request, visitor: Visitor) -> Response:
        """The page with all replays, newest first."""
        before = fields.counted_parameter(request, "before")
        async with self.site.session() as session:
            found = await list_replays(session, limit=fields.PAGE_ROWS + 1, before=before, tenant_id=visitor.tenant_id)
        rows = found[: fields.PAGE_ROWS]
        return await self.site.page(
            request,
            visitor,
            "replays.html",
            rows=[(each, self._state(each)) for each in rows],
            next=rows[-1].replay_id if len(found) > len(rows) else None,
            is_first=before is None,
            is_creating=fields.parameter(request, "creating") == "yes",
        )

    async def preview(self, request: Request, visitor: Visitor) -> Response:
        """The page with the dry run of a filter."""
        require_operate(visitor)
        try:
            wanted = read_filter(visitor, request.query_params)
        except Mistake as mistake:
            raise PageError(400, str(mistake), "Go back, and correct the filter.") from None
        return await self._preview(request, visitor, wanted, request.query_params)

    async def create(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Starts a replay, unless its filter now selects more emails than the dry run showed."""
        try:
            wanted = read_filter(visitor, form)
        except Mistake as mistake:
            raise PageError(400, str(mistake), "Go back, and correct the filter.") from None
        try:
            act = fields.act_of(visitor, form)
            shown = _shown(form)
            replay = await self.site.jobs.create_replay(
                wanted.selection,
                act,
                at_most=shown,
                include_held="include_held" in form,
                per_second=_pace(form) or replaying.DEFAULT_PER_SECOND,
                within_seconds=CREATION_SECONDS,
            )
        except replaying.SelectionGrown as error:
            return await self._preview(request, visitor, wanted, form, mistake=error.message, status=409)
        except Mistake as mistake:
            return await self._preview(request, visitor, wanted, form, mistake=str(mistake), status=400)
        if replay is None:
            return self.site.see_other(PATH, creating="yes")
        return self.site.see_other(f"{PATH}/{replay.replay_id}")

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with a replay's progress."""
        async with self.site.session() as session:
            replay = await self._found(session, request, visitor)
            became = await count_replayed_by_status(session, replay.replay_id, limit=MOST_COUNTED)
        return await self._page(request, visitor, replay, became)

    async def stop(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Stops a replay after its current email."""

        async def change(session: AsyncSession, replay: Replay, act: Act) -> None:
            await replaying.stop(session, replay.replay_id, act)

        return await self._change(request, visitor, form, change)

    async def resume(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Continues a stopped or interrupted replay in this process."""

        async def change(session: AsyncSession, replay: Replay, act: Act) -> None:
            pace = _pace(form)
            resumed = await replaying.resume(
                session, replay.replay_id, per_second=pace, actor=act.actor, reason=act.reason
            )
            if resumed is not None and resumed.state is ReplayState.RUNNING:
                self.site.jobs.start_replay(resumed)

        return await self._change(request, visitor, form, change)

    async def _change(
        self,
        request: Request,
        visitor: Visitor,
        form: Form,
        change: Callable[[AsyncSession, Replay, Act], Awaitable[None]],
    ) -> Response:
        async with self.site.session() as session:
            replay = await self._found(session, request, visitor)
            try:
                await change(session, replay, fields.act_of(visitor, form))
            except Mistake as mistake:
                return await self._page(request, visitor, replay, {}, mistake)
        return self.site.see_other(f"{PATH}/{replay.replay_id}")

    async def _found(self, session: AsyncSession, request: Request, visitor: Visitor) -> Replay:
        """The replay that the path names. A tenant's visitor sees only replays whose filter names the tenant."""
        replay = await replaying.find(session, fields.number_in_path(request, "replay_id", "replay"))
        if replay is None or visitor.tenant_id not in (None, replay.selection.get("tenant_id")):
            raise not_found("replay")
        return replay

    async def _page(
        self,
        request: Request,
        visitor: Visitor,
        replay: Replay,
        became: Mapping[Any, int],
        mistake: Mistake | None = None,
    ) -> Response:
        is_own = (
            visitor.tenant_id is None
            or replay.actor == visitor.name
            or self.site.access.is_own_act(replay.actor, visitor.tenant_id)
        )
        return await self.site.page(
            request,
            visitor,
            "replay.html",
            status=200 if mistake is None else 400,
            replay=replay,
            state=self._state(replay),
            became=became,
            most_counted=MOST_COUNTED,
            by=replay.actor if is_own else AN_OPERATOR,
            reason=replay.reason if is_own else None,
            mistake=mistake,
        )

    def _state(self, replay: Replay) -> str:
        """The replay's state.

        `stopping`: an operator has stopped the replay, but a process still runs it. `interrupted`: no operator has
        stopped the replay, but no process runs it.
        """
        is_run = replay.is_active or self.site.jobs.has_replay(replay.replay_id)
        if replay.state is ReplayState.STOPPED and is_run:
            return "stopping"
        return "interrupted" if replay.state is ReplayState.RUNNING and not is_run else replay.state.value

    async def _preview(
        self,
        request: Request,
        visitor: Visitor,
        wanted: DeadFilter,
        given: Mapping[str, str],
        *,
        mistake: str | None = None,
        status: int = 200,
    ) -> Response:
        include_held = "include_held" in given
        async with self.site.session() as session:
            preview = await replaying.preview(session, wanted.selection, include_held=include_held)
            overlaps = await replaying.overlaps(session, wanted.selection) if visitor.tenant_id is None else []
        return await self.site.page(
            request,
            visitor,
            "replay_new.html",
            status=status,
            preview=preview,
            overlaps=overlaps,
            include_held=include_held,
            typed=wanted.typed,
            labels=LABELS,
            given=given,
            per_second=given.get("per_second") or f"{replaying.DEFAULT_PER_SECOND:g}",
            mistake=mistake,
        )


def _pace(form: Form) -> float | None:
    label = "“Emails per second”"
    return fields.number_of(form, "per_second", label, least=replaying.MIN_PER_SECOND, most=MAX_PER_SECOND)


def _shown(form: Form) -> int:
    """The number of emails that the dry run showed.

    Raises:
        Mistake: The number is missing.
    """
    text = form.get("shown", "")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Mistake(
            "Nothing was replayed: the form lacks the number of emails from the dry run. Check the new dry run on this "
            "page, and confirm again."
        )
    return int(text)
