"""The pages Poison: messages on the dead-letter queue that belong to no email.

Only for visitors who see all tenants.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.domain.poison_id import is_poison_id
from dispatcher.domain.scrub import scrub
from dispatcher.ops.poison import discard_poison, glimpse, list_poison
from dispatcher.ops.safe_text import safe_text
from dispatcher.store.connections import AsyncSession, connect_async

PATH: Final = "/poison"
MOST_READ: Final = 20_000
"""The page reads the dead-letter queue only if it has at most this many messages."""
MOST_SHOWN: Final = 50
SHOWN_CHARACTERS: Final = 4000
_SCRUBBED: Final = 2 * SHOWN_CHARACTERS
"""How many characters are scrubbed: more than are shown, because `scrub` cannot recognize an address that is cut
off."""


def routes(site: Site) -> list[Route]:
    """The routes of the list, of one message, and of its form. Each request reads the whole queue, as `dispatcher dlq
    list --poison` does, so the pages do not refresh themselves."""

    async def show_all(request: Request, visitor: Visitor) -> Response:
        """The page with the poison messages, in the order of the queue."""
        fields.all_tenants_only(visitor)
        async with _opened(site) as (session, dlq):
            found = await list_poison(session, dlq)
        return await site.page(
            request,
            visitor,
            "poison_list.html",
            queue=site.settings.dlq,
            rows=[(each, glimpse(each.body)) for each in found[:MOST_SHOWN]],
            count=len(found),
            removed=fields.counted(fields.parameter(request, "removed")),
        )

    async def show(request: Request, visitor: Visitor, mistake: Mistake | None = None) -> Response:
        """The page of one message: its beginning as text, without addresses."""
        name = _name(request, visitor)
        async with _opened(site) as (session, dlq):
            found = [each for each in await list_poison(session, dlq) if each.poison_id == name]
        if not found:
            raise _unknown()
        headers = orjson.dumps(
            {**found[0].headers, "x-death": found[0].x_death}, default=str, option=orjson.OPT_INDENT_2
        )
        return await site.page(
            request,
            visitor,
            "poison.html",
            status=200 if mistake is None else 400,
            poison=found[0],
            count=len(found),
            text=_shown(safe_text(found[0].body[:_SCRUBBED], _SCRUBBED)),
            headers=_shown(headers.decode()[:_SCRUBBED]),
            mistake=mistake,
        )

    async def discard(request: Request, visitor: Visitor, form: Form) -> Response:
        """Removes from the queue all messages that have the id in the path."""
        name = _name(request, visitor)
        try:
            act = fields.act_of(visitor, form)
        except Mistake as mistake:
            return await show(request, visitor, mistake)
        async with _opened(site) as (session, dlq):
            removed = await discard_poison(session, dlq, name, act)
        return site.see_other(PATH, removed=removed)

    return [
        site.get(PATH, show_all),
        site.get(f"{PATH}/{{poison_id}}", show),
        site.post(f"{PATH}/{{poison_id}}/discard", discard, title="Discard a poison message"),
    ]


@asynccontextmanager
async def _opened(site: Site) -> AsyncIterator[tuple[AsyncSession, DeadLetterQueue]]:
    """Yields a new database session and the dead-letter queue.

    Only one session at a time can read the queue, so a read may have to wait for another session: longer than the
    page's own sessions may wait.
    """
    async with (
        await connect_async(site.settings.database_url, name="dispatcher api poison") as session,
        site.jobs.open_dlq("poison") as dlq,
    ):
        if (depth := await dlq.depth()) > MOST_READ:
            raise PageError(
                409,
                f"The dead-letter queue has {depth:,} messages, more than the {MOST_READ:,} that this page reads.",
                "Use `dispatcher dlq list --poison`.",
            )
        yield session, dlq


def _name(request: Request, visitor: Visitor) -> str:
    fields.all_tenants_only(visitor)
    name: str = request.path_params["poison_id"]
    if not is_poison_id(name):
        raise _unknown()
    return name


def _unknown() -> PageError:
    return PageError(404, "The dead-letter queue has no poison message with this id.", "See the list under Poison.")


def _shown(text: str) -> str:
    """The beginning of a text, without addresses."""
    scrubbed = scrub(text)
    return scrubbed if len(scrubbed) <= SHOWN_CHARACTERS else f"{scrubbed[:SHOWN_CHARACTERS]}…"
