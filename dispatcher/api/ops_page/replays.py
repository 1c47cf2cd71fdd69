"""The pages Replays: show the dry run of a filter, start a replay, show its progress, stop and resume it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Mistakes, read
from dispatcher.actions.dlq import CreateReplay, ListReplays
from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.face import listed, words_of
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.domain.failures import DEFAULT_PER_SECOND, MAX_PER_SECOND, MIN_PER_SECOND, Replay
from dispatcher.ops import replaying
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import AN_OPERATOR
from dispatcher.store.connections import AsyncSession
from dispatcher.store.replays import count_replayed_by_status, find_replay

PATH: Final = "/replays"
CREATION_SECONDS: Final = 5.0
"""How long a visitor waits while a large replay is created. The creation continues afterwards."""
MOST_COUNTED: Final = 10_000


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
        page, filters, mistake = await listed(self.site, ListReplays, request, visitor)
        return await self.site.page(
            request,
            visitor,
            "replays.html",
            status=200 if mistake is None else 400,
            action=ListReplays,
            page=replace(page, rows=[self.site.jobs.seen(each) for each in page.rows]),
            filters=filters,
            mistake=mistake,
            is_creating=fields.parameter(request, "creating") == "yes",
        )

    async def preview(self, request: Request, visitor: Visitor) -> Response:
        """The page with the dry run of a filter."""
        require_operate(visitor)
        return await self._preview(request, visitor, _asked(visitor, request.query_params), request.query_params)

    async def create(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Starts a replay, unless its filter now selects more emails than the dry run showed."""
        asked = _asked(visitor, form)
        try:
            replay = await self.site.jobs.create_replay(
                asked.selected(),
                fields.act_of(visitor, form),
                at_most=_shown(form),
                include_held=asked.include_held,
                per_second=_pace(form) or DEFAULT_PER_SECOND,
                within_seconds=CREATION_SECONDS,
            )
        except replaying.SelectionGrown as error:
            return await self._preview(request, visitor, asked, form, mistake=error.message, status=409)
        except Mistake as mistake:
            return await self._preview(request, visitor, asked, form, mistake=str(mistake), status=400)
        if replay is None:
            return self.site.see_other(PATH, creating="yes")
        return self.site.see_other(f"{PATH}/{replay.id}")

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page with a replay's progress."""
        async with self.site.session() as session:
            replay = await self._found(session, request, visitor)
            became = await count_replayed_by_status(session, replay_id=replay.id, limit=MOST_COUNTED)
        return await self._page(request, visitor, replay, became)

    async def stop(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Stops a replay after its current email."""

        async def change(session: AsyncSession, replay: Replay, act: Act) -> None:
            await replaying.stop(session, replay.id, act)

        return await self._change(request, visitor, form, change)

    async def resume(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """Continues a stopped or interrupted replay in this process."""

        async def change(session: AsyncSession, replay: Replay, act: Act) -> None:
            pace = _pace(form)
            resumed = await replaying.resume(session, replay.id, per_second=pace, actor=act.actor, reason=act.reason)
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
        return self.site.see_other(f"{PATH}/{replay.id}")

    async def _found(self, session: AsyncSession, request: Request, visitor: Visitor) -> Replay:
        """The replay that the path names. A tenant's visitor sees only replays whose filter names the tenant."""
        replay = await find_replay(session, fields.number_in_path(request, "replay_id", "replay"))
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
            replay=self.site.jobs.seen(replay),
            became=became,
            most_counted=MOST_COUNTED,
            by=replay.actor if is_own else AN_OPERATOR,
            reason=replay.reason if is_own else None,
            mistake=mistake,
        )

    async def _preview(
        self,
        request: Request,
        visitor: Visitor,
        asked: CreateReplay,
        given: Mapping[str, str],
        *,
        mistake: str | None = None,
        status: int = 200,
    ) -> Response:
        wanted, include_held = asked.selected(), asked.include_held
        async with self.site.session() as session:
            preview = await replaying.preview(session, wanted, include_held=include_held)
            overlaps = await replaying.overlaps(session, wanted) if visitor.tenant_id is None else []
        return await self.site.page(
            request,
            visitor,
            "replay_new.html",
            status=status,
            action=CreateReplay,
            preview=preview,
            overlaps=overlaps,
            include_held=include_held,
            typed=_typed(given),
            given=given,
            per_second=given.get("per_second") or f"{DEFAULT_PER_SECOND:g}",
            mistake=mistake,
        )


def _typed(given: Mapping[str, str]) -> dict[str, str]:
    """The fields of the filter, as they were typed."""
    names = (*CreateReplay.filters, "tenant_id")
    return {name: text for name in names if (text := given.get(name, "").replace("\0", "").strip())}


def _asked(visitor: Visitor, given: Mapping[str, str]) -> CreateReplay:
    """The replay of a filter. A visitor of one tenant replays only emails of this tenant.

    Raises:
        PageError: A field of the filter is wrong, or the visitor may not see the tenant.
    """
    typed = _typed(given)
    if visitor.tenant_id is not None or "tenant_id" in typed:
        typed["tenant_id"] = fields.tenant_of(visitor, typed.get("tenant_id", ""))
    try:
        asked = read(CreateReplay, {}, typed)
    except Mistakes as error:
        raise PageError(400, words_of(error), "Go back, and correct the filter.") from None
    return asked.but(include_held="include_held" in given)


def _pace(form: Form) -> float | None:
    label = "“Emails per second”"
    return fields.number_of(form, "per_second", label, least=MIN_PER_SECOND, most=MAX_PER_SECOND)


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
