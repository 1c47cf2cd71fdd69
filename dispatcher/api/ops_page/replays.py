"""The pages Replays: show the dry run of a filter, start a replay, show its progress, stop and resume it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Mistakes
from dispatcher.actions.dlq import CreateReplay, GetReplay, ListReplays, ResumeReplay, StopReplay
from dispatcher.api.ops_page import face, fields
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.domain.failures import DEFAULT_PER_SECOND, ItemOutcome, Replay
from dispatcher.ops import replaying
from dispatcher.ops.email_history import AN_OPERATOR
from dispatcher.store.failures import MOST_GROUPED, MOST_GROUPS, group_dead
from dispatcher.store.replays import count_replayed_by_status

PATH: Final = "/replays"
CREATION_SECONDS: Final = 5.0
"""How long a visitor waits while a large replay is created. The creation continues afterwards."""
MOST_COUNTED: Final = 10_000
_NOT_SHOWN: Final = (
    "Nothing was replayed: the form lacks the number of emails from the dry run. Check the new dry run on this page, "
    "and confirm again."
)


def routes(site: Site) -> list[Route]:
    async def show_all(request: Request, visitor: Visitor) -> Response:
        is_creating, seen = fields.parameter(request, "creating") == "yes", site.jobs.seen
        return await face.list_page(
            site, request, visitor, "replays.html", [ListReplays], is_creating=is_creating, seen=seen
        )

    async def show(request: Request, visitor: Visitor, posted: face.Posted = face.NOTHING) -> Response:
        """The page with a replay's progress. A tenant's visitor sees only replays whose filter names the tenant, and
        sees the filter only if the tenant's own people created the replay."""
        replay = await face.one(site, GetReplay, request, visitor, posted.form)
        async with site.session() as session:
            became = await count_replayed_by_status(session, replay_id=replay.id, limit=MOST_COUNTED)
        is_own = (
            visitor.tenant_id is None
            or replay.actor == visitor.name
            or site.access.is_own_act(replay.actor, visitor.tenant_id)
        )
        values = {
            "replay": site.jobs.seen(replay),
            "became": became,
            "most_counted": MOST_COUNTED,
            "is_own": is_own,
            "by": replay.actor if is_own else AN_OPERATOR,
            "reason": replay.reason if is_own else None,
            "stop": StopReplay,
            "resume": ResumeReplay,
        }
        return await face.shown(site, request, visitor, "replay.html", [], posted, **values)

    async def preview(request: Request, visitor: Visitor) -> Response:
        require_operate(visitor)
        fields.note_unknown(request, (*CreateReplay.filters, "tenant_id"))
        return await _dry_run(site, request, visitor, fields.chosen(request))

    async def create(request: Request, visitor: Visitor, form: Form) -> Response:
        """Starts a replay, unless its filter now selects more emails than the dry run showed."""
        try:
            texts = _typed(form) | fields.typed(form, ("per_second", "reason"))
            asked = face.asked(CreateReplay, request, visitor, texts).but(include_held="include_held" in form)
            if (shown := fields.counted(form.get("shown", ""))) is None:
                return await _dry_run(site, request, visitor, form, _NOT_SHOWN, 400)
            replay = await site.jobs.create_replay(
                asked, visitor.act(asked.reason), at_most=shown, within_seconds=CREATION_SECONDS
            )
        except replaying.SelectionGrown as error:
            return await _dry_run(site, request, visitor, form, error.message, 409)
        except Mistakes as error:
            return await _dry_run(site, request, visitor, form, face.words_of(error), 400)
        if replay is None:
            return site.see_other(PATH, creating="yes")
        return site.see_other(f"{PATH}/{replay.id}")

    def start(replay: Replay) -> None:
        site.jobs.start_replay(replay)

    one = f"{PATH}/{{replay_id}}"
    return [
        site.get(PATH, show_all),
        site.get(f"{PATH}/new", preview),
        site.post(f"{PATH}/new", create, title="Replay emails"),
        site.get(one, show),
        *face.forms(site, [StopReplay], show, one),
        *face.forms(site, [ResumeReplay], show, one, start),
    ]


async def _dry_run(
    site: Site,
    request: Request,
    visitor: Visitor,
    given: Mapping[str, str],
    mistake: str | None = None,
    status: int = 200,
) -> Response:
    includes_held = "include_held" in given
    try:
        wanted = face.asked(CreateReplay, request, visitor, _typed(given), needs_reason=False).selected()
    except Mistakes as error:
        raise PageError(400, face.words_of(error), "Go back, and correct the filter.") from None
    async with site.session() as session:
        preview = await replaying.preview(session, wanted, include_held=includes_held)
        causes = await group_dead(session, wanted, "cause", limit=MOST_GROUPED, groups=MOST_GROUPS)
        lines = await site.lines(session, preview.samples.get(ItemOutcome.REPLAYED, []))
        overlaps = await replaying.overlaps(session, wanted) if visitor.tenant_id is None else []
    return await site.page(
        request,
        visitor,
        "replay_new.html",
        status=status,
        action=CreateReplay,
        preview=preview,
        causes=causes,
        lines=lines,
        overlaps=overlaps,
        include_held=includes_held,
        typed=_typed(given),
        given=given,
        per_second=given.get("per_second") or f"{DEFAULT_PER_SECOND:g}",
        mistake=mistake,
    )


def _typed(given: Mapping[str, str]) -> dict[str, str]:
    return fields.typed(given, (*CreateReplay.filters, "tenant_id", "email_ids"))
