"""The pages Emails (a search) and Email (what happened to one email, and what an operator may decide about it)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.emails import FoundPage, ListEmails
from dispatcher.actions.runner import Face, Who, run
from dispatcher.actions.unsent import Cancel
from dispatcher.api.ops_page import email_decisions
from dispatcher.api.ops_page.email_decisions import done, find_choices, find_shown
from dispatcher.api.ops_page.email_search import NAMES, By, SearchForm, as_id, read_form
from dispatcher.api.ops_page.fields import note_unknown, typed
from dispatcher.api.ops_page.page_errors import not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.api.ops_page.zones import zone_of
from dispatcher.domain.email_history import facts, since
from dispatcher.domain.status import FINISHED
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.ops.email_lines import EmailLine
from dispatcher.ops.names import find_by_key
from dispatcher.store.connections import AsyncSession
from dispatcher.store.emails import find_email
from dispatcher.store.suppressions import find_suppressions_of_email

_IDS: Final = ("email", "message key", "correlation id", "provider's id", "trace", "Message-ID")
"""The facts by which other systems identify the email."""
_TOLD: Final = frozenset(
    {
        *("tenant", "channel", "status", "status since", "delivery", "lane", "error type", "last error", "message key"),
        *("enqueued", "resent from", "resent as", "published", "last leased", "sent", "dead letter published"),
        *("dead letter discarded", "not before"),
    }
)
"""The facts that the head or the story of the email says."""
_LETTERS: Final = re.compile(r"[a-z_]+")
_TONES: Final[Mapping[str, frozenset[str]]] = {
    "bad": frozenset({"failed", "rejected", "bounced", "complained", "dead"}),
    "warn": frozenset({"held", "uncertain", "deferred", "delayed", "cancelled", "expired", "discarded"}),
    "good": frozenset({"sent", "accepted", "delivered", "opened", "clicked", "confirm", "confirmed"}),
}
"""The CSS classes of moments in the timeline, and the words in `Moment.what` that select them. The first match is
used."""


@dataclass(slots=True)
class _Found:
    """What a search found: one email by its id or key, or each tenant's email with this key, or a page of emails.

    `kind` is the kind of text by which they were found, and `tried` are the kinds by which none was found.
    """

    email_id: UUID | None = None
    named: dict[str, UUID] = field(default_factory=dict)
    page: FoundPage | None = None
    lines: Sequence[EmailLine] = ()
    kind: By | None = None
    tried: list[By] = field(default_factory=list)


def routes(site: Site) -> list[Route]:
    pages = _EmailPages(site)
    return [
        site.get("/emails", pages.search),
        site.get("/emails/by-key/{message_key:path}", pages.by_key),
        site.get("/emails/{email_id:uuid}", pages.show),
        *email_decisions.routes(site),
    ]


@dataclass(frozen=True, slots=True)
class _EmailPages:
    site: Site

    async def search(self, request: Request, visitor: Visitor) -> Response:
        """The page with the search and its results. If the text identifies only one email, redirects to the email."""
        note_unknown(request, ("q", "by", *ListEmails.fields))
        form = read_form(request.query_params, tenant_id=visitor.tenant_id, zone=zone_of(request))
        found = _Found()
        if not form.errors:
            async with self.site.session() as session:
                found = await _look_up(session, form)
                if found.page is not None:
                    found.lines = await self.site.lines(session, [each.id for each in found.page.rows])
        if found.email_id is not None:
            return self.site.see_other(f"/emails/{found.email_id}")
        shown = [each for name, each in ListEmails.fields.items() if name not in ("after", "limit")]
        return await self.site.page(
            request,
            visitor,
            "emails.html",
            status=400 if form.errors else 200,
            form=form,
            filters=[each for each in shown if visitor.tenant_id is None or each.name != "tenant_id"],
            has_filters=len(form.parameters.keys() - {"q", "by", "limit"}),
            kinds={kind.value: name for kind, name in NAMES.items() if kind is not By.ANYTHING},
            named=found.named,
            page=found.page,
            lines=found.lines,
            caption=_caption(found),
            unsent=_unsent(form),
            tried=[NAMES[kind] for kind in found.tried],
            by=found.kind.value if found.kind else form.typed.get("by"),
        )

    async def by_key(self, request: Request, visitor: Visitor) -> Response:
        """Redirects from a message key to its email, or to the search if several tenants have the key."""
        key = request.path_params["message_key"]
        asked = typed(request.query_params, ["tenant_id"]).get("tenant_id")
        tenant_id = asked if visitor.tenant_id is None else visitor.tenant_id
        if not key.isprintable() or len(key) > MAX_KEY_CHARACTERS or not (tenant_id or "").isprintable():
            raise not_found("email")
        async with self.site.session() as session:
            named = await find_by_key(session, key, tenant_id=tenant_id)
        if not named:
            raise not_found("email")
        if len(named) > 1:
            return self.site.see_other("/emails", q=key, by=By.KEY.value)
        (email_id,) = named.values()
        return self.site.see_other(f"/emails/{email_id}")

    async def show(self, request: Request, visitor: Visitor) -> Response:
        async with self.site.session() as session:
            history = await find_shown(self.site, session, request, visitor)
            choices, why = await find_choices(session, history)
            (line,) = await self.site.lines(session, [history.email.email_id])
            of_email = (history.email.tenant_id, history.email.email_id)
            suppressed = await find_suppressions_of_email(session, *of_email) if history.trouble else []
        return await self.site.page(
            request,
            visitor,
            "email.html",
            email=history.email,
            since=since(history.email),
            waiting=history.waiting,
            choices=choices,
            why="" if history.trouble else why,
            trouble=history.trouble,
            suppressed=suppressed,
            done=done(request, visitor, history),
            timeline=history.timeline,
            tone=_tone,
            line=line,
            facts={name: value for name, value in facts(history.email).items() if name not in _TOLD},
            ids=_IDS,
            recipients=history.recipients or [],
            is_live=history.email.status not in FINISHED,
        )


async def _look_up(session: AsyncSession, form: SearchForm) -> _Found:
    """Searches by each kind that the text can be, such as a key or an address, until emails are found."""
    found = _Found()
    for kind in form.kinds:
        if kind is By.ID:
            email_id = as_id(form.text)
            if email_id and await find_email(session, email_id, tenant_id=form.filters.tenant_id):
                return _Found(email_id=email_id)
        elif kind is By.KEY:
            named = await find_by_key(session, form.text, tenant_id=form.filters.tenant_id)
            if named:
                return _Found(email_id=next(iter(named.values()))) if len(named) == 1 else _Found(named=named)
        else:
            found.page = await _search(session, form.wanted(kind))
            if found.page.rows or found.page.was_cut:
                return _Found(page=found.page, kind=kind)
        found.tried.append(kind)
    if not form.kinds:
        found.page = await _search(session, form.filters)
    return found


async def _search(session: AsyncSession, asked: ListEmails) -> FoundPage:
    page = await run(session, asked, Who(Face.PAGE))
    assert isinstance(page, FoundPage)
    return page


def _unsent(form: SearchForm) -> Mapping[str, str] | None:
    """The filter with which the emails of a search are cancelled or rescheduled; None: there is no such filter."""
    if form.text or form.filters.status not in Cancel.statuses:
        return None
    typed = {name: text for name, text in form.parameters.items() if name != "by"}
    return typed if typed.keys() <= {*Cancel.filters, "tenant_id"} else None


def _caption(found: _Found) -> str:
    if found.page is None or not found.page.rows:
        return ""
    count = len(found.page.rows)
    by = f" by {NAMES[found.kind].removeprefix('a ').removeprefix('an ')}" if found.kind else ""
    which = "" if found.page.next is None else "The newest "
    return f"{which}{count} email{'' if count == 1 else 's'}{by}{'' if which else ', newest first'}"


def _tone(what: str) -> str:
    """The CSS class of a moment in the timeline, by the words in `what`: `good`, `bad`, `warn`, or empty."""
    words = frozenset(_LETTERS.findall(what))
    return next((each for each, marks in _TONES.items() if words & marks), "")
