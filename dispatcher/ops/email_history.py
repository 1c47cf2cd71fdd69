"""The history of one email, from the database, and its dead letters on the DLQ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import UUID

from dispatcher.domain.accounts import AccountRules
from dispatcher.domain.email_history import (
    Attempt,
    AuditedAct,
    EmailRow,
    EmailStatus,
    Moment,
    ProviderEvent,
    ReplayOfEmail,
    WaitStatus,
)
from dispatcher.domain.event import Delivery
from dispatcher.domain.listed_email import Envelope, LastEvent
from dispatcher.domain.outcome import delivered_recipients, left_out
from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.domain.retry import longest_recovery_seconds
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass, replace
from dispatcher.domain.waiting import MAX_AHEAD_COUNT, WaitExplanation, WaitReason, explain_wait
from dispatcher.ops.safe_text import json_value
from dispatcher.store import emails
from dispatcher.store.recipients import masked_recipients
from dispatcher.store.statements import Source

if TYPE_CHECKING:
    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.ops.acts import Act
    from dispatcher.store.connections import AsyncSession

DOUBTS: Final = MappingProxyType(
    {
        "impossible": "without effect, because no worker sent the email through this provider",
        "recipient": "suppresses no recipient, because nothing proves that it is about this one",
    }
)
"""What an event that proves less than it says does not do, by its doubt (docs/events.md)."""
AN_OPERATOR: Final = "an operator"
"""The actor that a tenant sees instead of people and keys that do not belong to the tenant."""
_PRIVATE_ACTS: Final = frozenset({"reveal", "forget"})
"""Acts on private data, which the API does not show."""
_WAITS: Final[Mapping[WaitReason, str]] = {
    WaitReason.SCHEDULED: "it is scheduled for later",
    WaitReason.REDELIVERY: "the provider deferred it, and it is tried again later",
    WaitReason.QUEUED: "other emails are ahead of it",
    WaitReason.LEASED: "a worker is sending it, or waits to try it again",
}
"""How a wait is explained to a tenant. All other reasons are about the whole service, and get one general
explanation."""


@dataclass(frozen=True, slots=True)
class EmailHistory:
    """Everything that the database has about an email. Only `content` and `envelope` are private.

    `recipients` (masked), `tags`, `metadata`, `envelope` and `content` are None if the content was deleted; the last
    two also if the caller did not request them. `waiting` is None unless the email is pending, waiting or sending.
    """

    email: EmailRow
    attempts: Sequence[Attempt]
    events: Sequence[ProviderEvent]
    acts: Sequence[AuditedAct]
    replays: Sequence[ReplayOfEmail]
    recipients: Sequence[str] | None = None
    tags: Sequence[str] | None = None
    metadata: Mapping[str, str] | None = None
    last_event: LastEvent | None = None
    envelope: Envelope | None = None
    waiting: WaitExplanation | None = None
    content: dict[str, Any] | None = None

    @property
    def tables(self) -> dict[str, Sequence[Any]]:
        """What every face lists, by its heading."""
        return {
            "timeline": self.timeline,
            "attempts (by the clock of the sending host)": self.attempts,
            "events from providers (by the provider's clock)": [
                replace(each, doubt=each.doubt and f"{each.doubt}: {DOUBTS.get(each.doubt, '')}")
                for each in self.events
            ],
            "operator actions": self.acts,
            "replays": self.replays,
        }

    @property
    def trouble(self) -> ProviderEvent | None:
        """The newest event that says what the delivery state says, if a recipient does not have the email, or did not
        want it."""
        state = self.email.delivery
        if state is None or not state.has_failed:
            return None
        believed = (each for each in reversed(self.events) if each.doubt != "impossible")
        return next((each for each in believed if Delivery.of(each.kind, each.bounce) == state), None)

    @property
    def timeline(self) -> list[Moment]:
        """Every instant that is known about the email, oldest first.

        The email's row stores only the last instant of each kind: after a replay, the earlier instants of `published`
        and `leased` are lost. Instants that an earlier release did not store are missing.
        """
        moments = [
            *_of_row(self.email),
            *map(_of_attempt, self.attempts),
            *map(_of_event, self.events),
            *(Moment(each.acted_at, _words(each.action), None, each.actor, each.reason) for each in self.acts),
            *(moment for each in self.replays for moment in _of_replay(each)),
        ]
        return sorted(moments, key=lambda moment: moment.at)


async def find_history(
    source: Source,
    email_id: UUID | None,
    *,
    tenant_id: str | None = None,
    message_key: str | None = None,
    providers: Collection[str] = (),
    rules: AccountRules | None = None,
    lease_seconds: float = 0.0,
    most_ahead: int = MAX_AHEAD_COUNT,
    sees_content: bool = False,
    reveal: Act | None = None,
) -> EmailHistory | None:
    """The history of an email, by its id, or by its tenant and key; None if there is no such email.

    Args:
        tenant_id: The only tenant whose emails the caller may see; None: all.
        providers: The configured providers; empty if the caller does not have the settings.
        rules: Which of them the email may use.
        most_ahead: Count at most this many emails ahead of the email. With 0, locks are not examined, either.
        sees_content: Whether the reader may read the sender, the recipients and the subject.
        reveal: Who reads the content, and why; the audit log records this before the content is read. None to leave
            the content out.
    """
    email = await emails.find_email(source, email_id, tenant_id=tenant_id, message_key=message_key)
    if email is None:
        return None
    email_id, content, waiting = email.email_id, None, None
    if reveal:
        from dispatcher.store.failures import audit

        await audit(cast("AsyncSession", source), "reveal", {email_id: None}, actor=reveal.actor, reason=reveal.reason)
        content = await emails.reveal_content(source, email_id)
    if facts := await emails.find_facts(source, email_id, most_ahead=most_ahead):
        holders = await emails.find_holders(source, email_id) if most_ahead else []
        if rules and email.channel == EMAIL_CHANNEL:
            providers = rules.allowed(providers, tenant=email.tenant_id, sender=None, lane=email.lane)
        recovery_seconds = longest_recovery_seconds(lease_seconds)
        waiting = explain_wait(facts, providers=providers, recovery_seconds=recovery_seconds, holders=holders)
    return EmailHistory(
        email,
        await emails.list_attempts(source, email_id),
        await emails.list_events(source, email_id),
        await emails.list_acts(source, email_id),
        await emails.list_replays_of(source, email_id),
        (await masked_recipients(source, [email_id])).get(email_id),
        *(await emails.find_details(source, [email_id])).get(email_id, (None, None, None)),
        (await emails.find_envelopes(source, [email_id])).get(email_id) if sees_content else None,
        waiting,
        content,
    )


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    """A dead letter on the DLQ.

    Attributes:
        position: The dead letter's position on the queue; 0 is the head.
        is_stale: Whether the dead letter is not about its email's current failure; see `dead_letters.is_current`.
        x_death: RabbitMQ's x-death header; empty unless RabbitMQ itself dead-lettered the message.
    """

    position: int
    is_stale: bool
    failed_at: Any
    attempts: int
    headers: dict[str, Any]
    x_death: list[Any]


async def find_messages(session: AsyncSession, dlq: DeadLetterQueue, email_id: UUID) -> list[DeadLetterMessage]:
    """The dead letters about an email, in the DLQ's order. Removes nothing."""
    from dispatcher.monitor.dead_letters import classify, scan  # here, because a history needs no broker

    named = str(email_id).encode()
    async with scan(session, dlq) as opened:
        found = [each async for batch in opened.batches() for each in batch if named in each.body.lower()]
    return [
        DeadLetterMessage(
            each.found.position,
            each.is_stale,
            each.dead_letter.failed_at,
            each.dead_letter.attempts,
            {name: value for name, value in headers.items() if name != "x-death"},
            headers.get("x-death", []),
        )
        for each in await classify(session, found)
        if each.dead_letter and each.dead_letter.email_id == email_id
        for headers in [json_value(each.found.properties.headers or {})]
    ]


def for_tenant(history: EmailHistory, is_own: Callable[[str | None], bool]) -> EmailHistory:
    """The history as a tenant sees it: without hosts, and without other operators' names and reasons."""
    waiting = history.waiting
    if waiting is not None:
        because = _WAITS.get(waiting.reason, "the service cannot send it at the moment")
        waiting = WaitExplanation(waiting.reason, f"The email waits because {because}.", waiting.until)
    hidden: dict[str, Any] = {"actor": AN_OPERATOR, "reason": None}
    return replace(
        history,
        email=replace(history.email, locked_by=None),
        attempts=[replace(each, worker=None) for each in history.attempts],
        acts=[each if is_own(each.actor) else replace(each, **hidden, detail=None) for each in history.acts],
        replays=[each if is_own(each.actor) else replace(each, **hidden) for each in history.replays],
        waiting=waiting,
    )


def status_of(history: EmailHistory) -> EmailStatus:
    """The history as the API shows it: as a tenant sees it, without operators, and without what was done to private
    data."""
    acts = [each for each in history.acts if each.action not in _PRIVATE_ACTS]
    seen = for_tenant(replace(history, acts=acts), lambda _: False)
    email, waiting = history.email, history.waiting
    is_error = email.error_type is not None
    return EmailStatus(
        email.email_id,
        **{name: getattr(email, name) for name in EmailStatus.__match_args__ if hasattr(email, name)},
        error=email.last_error if is_error else None,
        answer=None if is_error else email.last_error,
        **{name: getattr(history, name) for name in ("recipients", "tags", "metadata", "last_event", "envelope")},
        refused_recipients=None if is_error else left_out(email.last_error),
        delivered_recipients=delivered_recipients(email.status, email.recipient_outcomes),
        waiting=None if waiting is None else WaitStatus(waiting.reason, waiting.until),
        attempts=seen.attempts,
        events=seen.events,
        timeline=[replace(each, actor=None, reason=None) for each in seen.timeline],
    )


def _of_row(email: EmailRow) -> Iterator[Moment]:
    yield Moment(email.created_at, "enqueued", f"lane {email.lane}")
    for at, what in ((email.published_at, "published"), (email.leased_at, "leased"), (email.sent_at, "sent")):
        if at is not None:
            yield Moment(at, what, f"by {email.locked_by}" if what == "leased" and email.locked_by else None)
    if email.status in (Status.FAILED, Status.HELD, Status.CANCELLED) and email.settled_at is not None:
        yield Moment(email.settled_at, email.status.value, _joined(email.error_type, email.last_error))
    if email.dead_lettered_at is not None:
        yield Moment(email.dead_lettered_at, "dead-lettered", "its dead letter is on the DLQ")
    if email.dead_letter_discarded_at is not None and email.status in (Status.FAILED, Status.HELD):
        yield Moment(email.dead_letter_discarded_at, "dead letter discarded")


def _of_attempt(attempt: Attempt) -> Moment:
    seconds = (attempt.finished_at - attempt.started_at).total_seconds()
    answer = _joined(attempt.provider_code, attempt.error_type, attempt.error or attempt.answer)
    what = f"attempt {attempt.attempt}: {attempt.outcome}"
    where = f"{attempt.provider}, after {seconds:.3f} s" + (f", by {attempt.worker}" if attempt.worker else "")
    return Moment(attempt.finished_at, what, _joined(where, answer))


def _of_event(event: ProviderEvent) -> Moment:
    whom = f"recipient {event.recipient}" if event.recipient else None
    doubt = DOUBTS.get(event.doubt or "")
    detail = _joined(event.provider, whom, doubt, event.code, event.detail)
    return Moment(event.happened_at, f"{event.kind} ({event.bounce})" if event.bounce else event.kind, detail)


def _of_replay(replay: ReplayOfEmail) -> Iterator[Moment]:
    if replay.settled_at is not None:
        what, number = _words(replay.outcome or "replay"), f"replay {replay.replay_id}"
        yield Moment(replay.settled_at, what, number, replay.actor, replay.reason)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _joined(*parts: str | None) -> str | None:
    return ": ".join(part for part in parts if part) or None
