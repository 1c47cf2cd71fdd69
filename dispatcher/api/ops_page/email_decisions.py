"""The forms with which an operator decides about one email, or reveals its content, and what a decision has done.

The records of `actions` say what each decision does, and carry it out with one conditional statement. A page that is
out of date does no harm: if the email has changed, the statement changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Change, Mistakes, Refused, read
from dispatcher.actions.batch import LOCKED, Batch
from dispatcher.actions.dlq import OUTCOMES, TWICE, CreateReplay, DiscardDead, StopReplay, select
from dispatcher.actions.held import Confirm, Release
from dispatcher.actions.resend import Resend
from dispatcher.actions.runner import Face, Who, run, run_batch
from dispatcher.actions.unsent import Cancel, Reschedule
from dispatcher.admission.access import Caller
from dispatcher.admission.problems import Problem
from dispatcher.api.ops_page.captured import FRAMING
from dispatcher.api.ops_page.face import who
from dispatcher.api.ops_page.fields import as_texts
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor, require_operate
from dispatcher.api.ops_page.zones import zone_of
from dispatcher.api.validation import admit
from dispatcher.domain.email_history import EmailRow, Moment, since
from dispatcher.domain.failures import DEAD, FAILS_AGAIN, ItemOutcome, ReplayState
from dispatcher.domain.outcome import NO_DEAD_LETTER
from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.domain.scrub import scrub
from dispatcher.domain.status import Status
from dispatcher.errors import StoreBusy
from dispatcher.ops import replaying
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import EmailHistory, find_history, for_tenant
from dispatcher.store.connections import AsyncSession

LOCK_SECONDS: Final = 1.0
"""How long a replay of one email waits while another transaction holds a lock on the email's row."""
REPEATED_WITHIN: Final = timedelta(minutes=10)
"""If a form repeats the newest decision within this time, the visitor has sent the form twice."""


class Reveal(Change[None], name="reveal"):
    """Reveal the recipients and the content of an email."""

    on_one = (
        "Shows the recipients, the subject, the text and the source of the HTML. Your name and your reason go into the "
        "audit log before anything is shown."
    )


DECISIONS: Final[Mapping[str, type[Change[Any]]]] = {
    each.verb(): each for each in (CreateReplay, Confirm, Release, Reschedule, Cancel, Resend, DiscardDead)
}
"""Every decision about one email by its name, in the order of the buttons."""
_NO_CHOICE: Final[Mapping[Status, str]] = {
    Status.SENDING: "A worker has leased the email. Nothing can be decided until the attempt ends.",
    Status.SENT: "The email is sent, and is not sent again.",
    Status.CANCELLED: "The email is cancelled, and is never sent.",
}
_NOT_REPLAYABLE: Final[Mapping[ItemOutcome, str]] = {
    ItemOutcome.EXPIRED: "The email cannot be sent again: it has expired.",
    ItemOutcome.CONTENT_PRUNED: "The email cannot be sent again: its content was deleted.",
}


async def find_choices(session: AsyncSession, history: EmailHistory) -> tuple[dict[str, str], str]:
    """What each decision that is possible now would do to an email, by its name; and why others are not possible."""
    email = history.email
    why = _NO_CHOICE.get(email.status, "")
    if email.status in DEAD:
        selection = select(email_ids=(email.email_id,), discarded=None)
        found = await replaying.preview(session, selection, include_held=True)
        why = "".join(_NOT_REPLAYABLE.get(outcome, "") for outcome in found.counts)
    has_letter = email.dead_letter_discarded_at is None and email.error_type not in NO_DEAD_LETTER
    choices = {}
    for name, action in DECISIONS.items():
        is_barred = bool(why) if action in (CreateReplay, Release) else action is DiscardDead and not has_letter
        is_barred |= action is Resend and history.recipients is None  # the content was deleted
        if email.status in action.statuses and not is_barred:
            choices[name] = action.on_one
    if "replay" in choices and email.was_uncertain:
        choices["replay"] += f" The outcome of an earlier attempt is unknown: the email may have arrived. {TWICE}"
    if "replay" in choices and email.error_type in NO_DEAD_LETTER:
        choices["replay"] += f" {FAILS_AGAIN[email.error_type]}"
    return choices, why


async def find_shown(
    site: Site, session: AsyncSession, request: Request, visitor: Visitor, reveal: Act | None = None
) -> EmailHistory:
    """The history of the email in the path, as the visitor may see it. Raises PageError if there is none."""
    history = await find_history(
        session,
        request.path_params["email_id"],
        tenant_id=visitor.tenant_id,
        providers=site.settings.providers,
        rules=site.settings.account_rules,
        lease_seconds=site.settings.lease_seconds,
        reveal=reveal,
    )
    if history is None:
        raise not_found("email")
    if visitor.tenant_id is None:
        return history
    return for_tenant(history, partial(site.access.is_own_act, tenant_id=visitor.tenant_id))


def newest_decision(history: EmailHistory) -> Moment | None:
    """The newest decision of an operator about the email; None if there is none."""
    return next((each for each in reversed(history.timeline) if each.actor and each.what != Reveal.name), None)


def done(request: Request, visitor: Visitor, history: EmailHistory) -> str | None:
    """What the visitor's decision did; None if another operator decided last, or if the decision is not recent.

    The URL also names the decision, but proves nothing, because anyone can write such a URL.
    """
    decision, newest = DECISIONS.get(request.query_params.get("done", "")), newest_decision(history)
    if decision is None or newest is None or newest.actor != visitor.name:
        return None
    return f"Done. {decision.done}" if datetime.now(UTC) - newest.at < REPEATED_WITHIN else None


def routes(site: Site) -> Iterator[Route]:
    pages = _DecisionPages(site)
    every: list[type[Change[Any]]] = [*DECISIONS.values(), Reveal]
    for action in every:
        name = action.verb()
        path, title = f"/emails/{{email_id:uuid}}/{name}", f"{name.capitalize()} an email"
        yield site.get(path, partial(pages.ask, action))
        yield site.post(path, partial(pages.decide, action), title=title)


@dataclass(frozen=True, slots=True)
class _DecisionPages:
    site: Site

    async def ask(
        self,
        action: type[Change[Any]],
        request: Request,
        visitor: Visitor,
        form: Mapping[str, str] | None = None,
        errors: Mapping[str, str] | None = None,
    ) -> Response:
        """The page that asks for the reason, and for the other fields of the action."""
        require_operate(visitor)
        choices, why = {Reveal.name: Reveal.on_one}, ""
        async with self.site.session() as session:
            history = await find_shown(self.site, session, request, visitor)
            if action is not Reveal:
                choices, why = await find_choices(session, history)
        if action.verb() not in choices:
            return await self._unchanged(action, request, visitor, history, why)
        return await self.site.page(
            request,
            visitor,
            "email_decision.html",
            status=422 if errors else 200,
            email=history.email,
            since=since(history.email),
            action=action,
            does=choices[action.verb()],
            asks=(*asked_of(action), "reason"),
            typed=form or {},
            errors=errors or {},
            now=datetime.now(UTC),
        )

    async def decide(self, action: type[Change[Any]], request: Request, visitor: Visitor, form: Form) -> Response:
        """Carries out a decision, and redirects to the page of the email; or shows the content of the email."""
        texts = {name: form.get(name, "").strip() for name in asked_of(action)}
        if "email_id" in action.fields:
            texts["email_id"] = str(request.path_params["email_id"])
        texts["reason"] = scrub(form.get("reason", ""))
        given = as_texts(action, {name: text for name, text in texts.items() if text}, zone_of(request))
        try:
            asked = read(action, {}, given, is_reason_required=True)
        except Mistakes as error:
            return await self.ask(action, request, visitor, form, {each.field: each.rule for each in error.mistakes})
        act = visitor.act(asked.reason)
        if action is Reveal:
            return await self._reveal(request, visitor, act)
        async with self.site.session() as session:
            history = await find_shown(self.site, session, request, visitor)
            why, field = "The email has changed since you opened the form: look at it again.", ""
            if form.get("attempts") == str(history.email.attempt_count):
                why, field = await self._carry_out(session, asked, history.email, act, visitor)
            if why:
                history = await find_shown(self.site, session, request, visitor)
        if field:
            return await self.ask(action, request, visitor, form, {field: why})
        newest = newest_decision(history)
        is_repeated = (
            newest is not None
            and (newest.actor, newest.reason) == (act.actor, act.reason)
            and datetime.now(UTC) - newest.at < REPEATED_WITHIN
        )
        if why and not is_repeated:
            return await self._unchanged(action, request, visitor, history, why)
        return self.site.see_other(f"/emails/{history.email.email_id}", done=action.verb())

    async def _unchanged(
        self, action: type[Change[Any]], request: Request, visitor: Visitor, history: EmailHistory, why: str
    ) -> Response:
        return await self.site.page(
            request,
            visitor,
            "email_unchanged.html",
            status=409,
            email=history.email,
            since=since(history.email),
            newest=newest_decision(history),
            heading=action.verb().capitalize(),
            why=why,
        )

    async def _reveal(self, request: Request, visitor: Visitor, act: Act) -> Response:
        """The page with recipients and content. The audit entry is written before the content is read."""
        async with self.site.session() as session:
            history = await find_shown(self.site, session, request, visitor, reveal=act)
        content = history.content or {}
        response = await self.site.page(
            request,
            visitor,
            "email_content.html",
            email=history.email,
            act=act,
            content=content,
            parts=f"/emails/{history.email.email_id}/revealed",
            is_email=history.email.channel == EMAIL_CHANNEL,
            others={
                name: value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
                for name in ("template_id", "template_data", "headers")
                if (value := content.get(name))
            },
        )
        response.headers.update(FRAMING)
        return response

    async def _carry_out(
        self, session: AsyncSession, asked: Change[Any], email: EmailRow, act: Act, visitor: Visitor
    ) -> tuple[str, str]:
        if not isinstance(asked, Resend):
            return await _carry_out(session, asked, email, act)
        key = self.site.access.valid_key(visitor.key_id)
        if visitor.key_id and key is None:
            return "The API key was revoked.", ""
        allowed = partial(admit, self.site.access, self.site.settings, Caller(key, visitor.name))
        try:
            await run(session, asked, replace(who(visitor), admit=allowed), self.site.settings)
        except Mistakes as error:
            (mistake,) = error.mistakes
            return mistake.rule, mistake.field
        except Refused as error:
            if error.name == "may_repeat":
                return f"must be chosen. {error.message.rstrip('.')}", error.name
            return f"{error.message} {error.remedy or ''}".strip(), ""
        except Problem as problem:
            return " ".join([*(each.detail for each in problem.errors), problem.detail or ""]).strip(), ""
        return "", ""


def asked_of(action: type[Change[Any]]) -> tuple[str, ...]:
    return action.asks or action.one_of


async def _carry_out(session: AsyncSession, asked: Change[Any], email: EmailRow, act: Act) -> tuple[str, str]:
    """Carries out a decision, audited, if the email's status still permits it.

    Returns why nothing was changed, and the field that prevented the change; both are empty otherwise.
    """
    locked = f"{LOCKED.detail} Try again in a few seconds."
    try:
        if not isinstance(asked, Batch):
            outcomes = await _replay(session, email.email_id, act)
            words = next((f"Nothing was changed: {OUTCOMES[each]}." for each in outcomes), locked)
            return ("" if ItemOutcome.REPLAYED in outcomes else words), ""
        asked = asked.but(tenant_id=email.tenant_id)
        async for (judged,) in run_batch(session, asked, Who(Face.PAGE, act.actor), [email.email_id]):
            verdict = asked.verdict(judged.verdict)
            if verdict.is_success and not verdict.words.startswith("not"):
                return "", ""
            words = (verdict.detail or verdict.words).format(status=judged.status)
            return (words if words.endswith(".") or verdict.at else f"{words}."), verdict.at
    except StoreBusy:
        return locked, ""
    raise AssertionError


async def _replay(session: AsyncSession, email_id: UUID, act: Act) -> list[ItemOutcome]:
    """Replays one email immediately. Returns what became of it; nothing, if its row is locked."""
    selection = select(email_ids=(email_id,), discarded=None)
    replay = await replaying.create(session, selection, act, include_held=True, per_second=None, source="ids")
    if replay.state is not ReplayState.DONE:  # another transaction has locked the row
        try:
            replay = (await replaying.run(session, replay.id, lock_seconds=LOCK_SECONDS)).replay
        finally:
            await run(session, StopReplay(replay_id=replay.id, reason=act.reason), Who(Face.PAGE, act.actor))
    return [ItemOutcome(each) for each in replay.outcomes]
