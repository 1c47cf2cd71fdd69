"""The pages Emails (a search) and Email (what happened to one email, and what an operator may decide about it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.emails import FoundPage, ListEmails
from dispatcher.actions.runner import Face, Who, run
from dispatcher.api.ops_page import email_view
from dispatcher.api.ops_page.email_decisions import DECISIONS, Choices, Decision, Result, carry_out, find_choices
from dispatcher.api.ops_page.email_search import NAMES, By, SearchForm, as_id, read_form
from dispatcher.api.ops_page.fields import MAX_REASON_CHARACTERS
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.domain.email_rules import instant
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import EmailHistory, find_history, for_tenant
from dispatcher.ops.names import find_by_key
from dispatcher.store.connections import AsyncSession
from dispatcher.store.emails import find_email

REVEAL_DOES: Final = (
    "Shows the recipients, the subject, the text and the source of the HTML. Your name and your reason go into the "
    "audit log before anything is shown."
)
_LABELS: Final[Mapping[str, str]] = {
    "q": "Find",
    "by": "as",
    "after": "The link to this page",
    **{name: each.label for name, each in ListEmails.fields.items() if name != "after"},
}
_AGES: Final = ("15m", "1h", "24h", "7d", "30d")


@dataclass(slots=True)
class _Found:
    """What a search found.

    Attributes:
        email_id: The email with this id or message key; None if there is none, or if several tenants have the key.
        named: If several tenants have the message key: each tenant's email with this key, by tenant.
        page: One page of the emails that match; None if no list was searched, because the text is an id or a key.
        kind: The kind of text, such as a domain, by which the search found emails; None if there is only a filter.
        tried: The kinds of text, such as a message key, by which the search found no email.
    """

    email_id: UUID | None = None
    named: dict[str, UUID] = field(default_factory=dict)
    page: FoundPage | None = None
    kind: By | None = None
    tried: list[By] = field(default_factory=list)


def routes(site: Site) -> list[Route]:
    """The routes of the pages Emails and Email."""
    pages = _EmailPages(site)
    decisions = []
    for decision in DECISIONS.values():
        path, title = f"/emails/{{email_id:uuid}}/{decision.name}", f"{decision.label}: an email"
        decisions += [
            site.get(path, partial(pages.ask, decision)),
            site.post(path, partial(pages.decide, decision), title=title),
        ]
    return [
        site.get("/emails", pages.search),
        site.get("/emails/by-key/{message_key:path}", pages.by_key),
        site.get("/emails/{email_id:uuid}", pages.show),
        site.get("/emails/{email_id:uuid}/reveal", pages.ask_to_reveal),
        site.post("/emails/{email_id:uuid}/reveal", pages.reveal, title="Reveal an email"),
        *decisions,
    ]


class _EmailPages:
    """The handlers of the pages Emails and Email."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def search(self, request: Request, visitor: Visitor) -> Response:
        """The page with the search and its results. If the text identifies only one email, redirects to the email."""
        form = read_form(request.query_params, tenant_id=visitor.tenant_id)
        found = _Found()
        if not form.errors:
            async with self._site.session() as session:
                found = await _look_up(session, form)
        if found.email_id is not None:
            return self._site.see_other(f"/emails/{found.email_id}")
        pinned = form.parameters | ({"by": found.kind.value} if found.kind else {})
        cursor = found.page.next if found.page else None
        settings = self._site.settings
        return await self._site.page(
            request,
            visitor,
            "emails.html",
            status=400 if form.errors else 200,
            form=form,
            labels=_LABELS,
            filters=[each for name, each in ListEmails.fields.items() if name in form.typed and name != "after"],
            suggested={"provider": settings.providers, "lane": list(settings.lanes), "created_from": _AGES},
            has_filters=len(form.parameters.keys() - {"q", "by"}),
            kinds={kind.value: name for kind, name in NAMES.items() if kind is not By.ANYTHING},
            named=found.named,
            page=found.page,
            caption=_caption(found),
            tried=[NAMES[kind] for kind in found.tried],
            newest=self._site.url("/emails", **pinned) if form.typed["after"] else None,
            next=self._site.url("/emails", **pinned, after=cursor) if cursor else None,
        )

    async def by_key(self, request: Request, visitor: Visitor) -> Response:
        """Redirects from a message key to its email, or to the search if several tenants have the key."""
        key = request.path_params["message_key"]
        tenant_id = visitor.tenant_id if visitor.tenant_id is not None else request.query_params.get("tenant_id")
        if not key.isprintable() or len(key) > MAX_KEY_CHARACTERS or not (tenant_id or "").isprintable():
            raise not_found("email")
        async with self._site.session() as session:
            named = await find_by_key(session, key, tenant_id=tenant_id)
        if not named:
            raise not_found("email")
        if len(named) > 1:
            return self._site.see_other("/emails", q=key, by=By.KEY.value)
        (email_id,) = named.values()
        return self._site.see_other(f"/emails/{email_id}")

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """The page of one email."""
        async with self._site.session() as session:
            history = await self._history(session, request, visitor)
            email = history.email
            choices = await find_choices(session, email)
        return await self._site.page(
            request,
            visitor,
            "email.html",
            email=email,
            since=email_view.since(email),
            waiting=history.waiting,
            choices=choices,
            done=_notice(request, visitor, history),
            timeline=history.timeline,
            tone=email_view.tone,
            fields=email_view.fields(email),
            ids=email_view.ids(email),
            attempts=history.attempts,
            events=history.events,
            recipients=history.recipients or [],
            is_live=not email_view.is_finished(email),
        )

    async def ask(self, decision: Decision, request: Request, visitor: Visitor) -> Response:
        """The page that asks the visitor to confirm a decision."""
        require_operate(visitor)
        async with self._site.session() as session:
            history = await self._history(session, request, visitor)
            choices = await find_choices(session, history.email)
        return await self._ask(decision, request, visitor, history, choices)

    async def decide(self, decision: Decision, request: Request, visitor: Visitor, form: Form) -> Response:
        """Carries out a decision, and redirects to the page of the email."""
        errors: dict[str, str] = {}
        act = _act(visitor, form, errors)
        send_at = _send_at(form, errors) if decision.needs_time else None
        async with self._site.session() as session:
            history = await self._history(session, request, visitor)
            result = Result()
            if act is not None and not errors:
                result = await self._decide(session, decision, history, act, form, send_at)
                if not result.is_done:
                    history = await self._history(session, request, visitor)
            if result.field is not None:
                errors[result.field] = result.why or ""
            choices = await find_choices(session, history.email) if errors else None
        if choices is not None:
            return await self._ask(decision, request, visitor, history, choices, form, errors)
        email_id = history.email.email_id
        if result.is_done or (act is not None and email_view.is_repeated(history, act)):
            return self._site.see_other(f"/emails/{email_id}", done=decision.name)
        return await self._unchanged(decision.label, request, visitor, history, result.why or "")

    async def ask_to_reveal(self, request: Request, visitor: Visitor) -> Response:
        """The page that asks for the reason to reveal an email."""
        require_operate(visitor)
        async with self._site.session() as session:
            history = await self._history(session, request, visitor)
        return await self._form(request, visitor, history, "reveal", "Reveal", REVEAL_DOES)

    async def reveal(self, request: Request, visitor: Visitor, form: Form) -> Response:
        """The page with recipients and content. The audit entry is written before the content is read."""
        errors: dict[str, str] = {}
        act = _act(visitor, form, errors)
        async with self._site.session() as session:
            history = await self._history(session, request, visitor, reveal=act)
        if act is None:
            return await self._form(request, visitor, history, "reveal", "Reveal", REVEAL_DOES, form, errors)
        content = history.content
        return await self._site.page(
            request,
            visitor,
            "email_content.html",
            email=history.email,
            act=act,
            content=content,
            recipients=_recipients(content or {}),
            others=_other_content(content or {}),
        )

    async def _history(
        self, session: AsyncSession, request: Request, visitor: Visitor, reveal: Act | None = None
    ) -> EmailHistory:
        """The history of the email in the path, as the visitor may see it.

        Raises:
            PageError: There is no such email, or it belongs to a tenant that the visitor may not see.
        """
        settings = self._site.settings
        history = await find_history(
            session,
            request.path_params["email_id"],
            tenant_id=visitor.tenant_id,
            providers=settings.providers,
            lease_seconds=settings.lease_seconds,
            reveal=reveal,
        )
        if history is None:
            raise not_found("email")
        if visitor.tenant_id is None:
            return history
        is_own = partial(self._site.access.is_own_act, tenant_id=visitor.tenant_id)
        return for_tenant(history, is_own)

    async def _decide(
        self,
        session: AsyncSession,
        decision: Decision,
        history: EmailHistory,
        act: Act,
        form: Form,
        send_at: datetime | None,
    ) -> Result:
        """Carries out a decision, unless the number of attempts has changed since the visitor opened the form."""
        email = history.email
        if form.get("attempts") != str(email.attempt_count):
            return Result("The email has changed since you opened the form: look at it again.")
        return await carry_out(session, decision, history, act, send_at=send_at)

    async def _ask(
        self,
        decision: Decision,
        request: Request,
        visitor: Visitor,
        history: EmailHistory,
        choices: Choices,
        form: Form | None = None,
        errors: Mapping[str, str] | None = None,
    ) -> Response:
        offer = choices.offer(decision.name)
        if offer is None:
            return await self._unchanged(decision.label, request, visitor, history, " ".join(choices.notes))
        return await self._form(
            request, visitor, history, decision.name, decision.label, offer.does, form, errors, decision=decision
        )

    async def _form(
        self,
        request: Request,
        visitor: Visitor,
        history: EmailHistory,
        name: str,
        label: str,
        does: str,
        form: Form | None = None,
        errors: Mapping[str, str] | None = None,
        *,
        decision: Decision | None = None,
    ) -> Response:
        return await self._site.page(
            request,
            visitor,
            "email_decision.html",
            status=422 if errors else 200,
            email=history.email,
            since=email_view.since(history.email),
            name=name,
            heading=f"{label}: this email",
            button=label,
            does=does,
            needs_time=decision is not None and decision.needs_time,
            is_danger=decision is not None and (decision.is_final or decision.name == "release"),
            typed=form or {},
            errors=errors or {},
            now=datetime.now(UTC),
        )

    async def _unchanged(
        self, label: str, request: Request, visitor: Visitor, history: EmailHistory, why: str
    ) -> Response:
        return await self._site.page(
            request,
            visitor,
            "email_unchanged.html",
            status=409,
            email=history.email,
            since=email_view.since(history.email),
            newest=email_view.newest_decision(history),
            heading=label,
            why=why,
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


def _caption(found: _Found) -> str:
    if found.page is None or not found.page.rows:
        return ""
    count = len(found.page.rows)
    by = f", by {NAMES[found.kind].split(' ', 1)[1]}" if found.kind else ""
    more = "" if found.page.next is None else "; older ones follow"
    return f"{count} email{'' if count == 1 else 's'}{by}, newest first{more}"


def _notice(request: Request, visitor: Visitor, history: EmailHistory) -> str | None:
    """What the visitor's decision did; None if another operator decided last, or if the decision is not recent.

    The URL also names the decision, but proves nothing, because anyone can write such a URL.
    """
    decision = DECISIONS.get(request.query_params.get("done", ""))
    newest = email_view.newest_decision(history)
    if decision is None or newest is None or newest.actor != visitor.name:
        return None
    is_fresh = datetime.now(UTC) - newest.at < email_view.REPEATED_WITHIN
    return f"Done. {decision.done}" if is_fresh else None


def _act(visitor: Visitor, form: Form, errors: dict[str, str]) -> Act | None:
    """The visitor's act; None, with an entry in `errors`, if the reason is missing or too long."""
    reason = form.get("reason", "")
    if len(reason) > MAX_REASON_CHARACTERS:
        errors["reason"] = f"is longer than {MAX_REASON_CHARACTERS} characters."
        return None
    try:
        return visitor.act(reason)
    except DispatcherError:
        errors["reason"] = "is missing. It goes into the audit log."
        return None


def _send_at(form: Form, errors: dict[str, str]) -> datetime | None:
    """The time in a form, by default in UTC; None, with an entry in `errors`, if it is not valid."""
    try:
        given = datetime.fromisoformat(form.get("send_at", "").strip())
        return instant("send_at", given if given.tzinfo else given.replace(tzinfo=UTC))
    except InvalidEmail as error:
        errors["send_at"] = f"{error.reason}."
    except ValueError:
        errors["send_at"] = "must be a date and a time, such as 2026-12-24 18:00."
    return None


def _recipients(content: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    given = content.get("recipients") or {}
    labels = {"to": "To", "cc": "Cc", "bcc": "Bcc", "reply_to": "Reply-To"}
    return [(label, list(given[name])) for name, label in labels.items() if given.get(name)]


def _other_content(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, object]] = [
        ("Template", content.get("template_id")),
        ("Template data", content.get("template_data")),
        ("Headers", content.get("headers")),
        ("Tags", ", ".join(content.get("tags") or [])),
    ]
    return [
        (label, value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
        for label, value in rows
        if value
    ]
