"""What is known about one email: as the database has it, as callers see it, and how every face names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.accounts import provider_of
from dispatcher.domain.event import Delivery
from dispatcher.domain.listed_email import ListedEmail
from dispatcher.domain.outcome import delivered_recipients, left_out
from dispatcher.domain.status import FINISHED, Status
from dispatcher.domain.values import dataclass

_LABELS: Final = {
    "acted_at": "when",
    "at": "when",
    "correlation_id": "correlation id",
    "created_at": "enqueued",
    "dead_lettered_at": "dead letter published",
    "happened_at": "when",
    "html_body": "html",
    "leased_at": "last leased",
    "locked_by": "leased by",
    "on_uncertain": "if uncertain",
    "provider_code": "code",
    "provider_message_id": "provider's id",
    "settled_at": "when",
    "text_body": "text",
    "traceparent": "trace",
}
"""The columns whose label is not made from their name (see `label`)."""
_EXPLAINED: Final = frozenset(
    {
        *("attempt_count", "attempt_base", "was_uncertain", "crash_count", "locked_until"),
        *("wait_until", "wait_reason", "redelivery_count", "recipient_outcomes", "settled_at", "last_error"),
    }
)
"""Columns that `facts` shows in a different form."""
_KEEP_MESSAGE_ID: Final = frozenset({"smtp", "capture"})
"""Providers that keep the Message-ID that the dispatcher creates. All other providers create their own."""


@dataclass(frozen=True, slots=True)
class EmailRow:
    """An email without content.

    Attributes:
        last_error: The last error, or the provider's answer if the email is sent.
        settled_at: When the email became failed, held or cancelled. None if the email never had one of these statuses,
            or got the status from an earlier release, which did not record the time.
        recipient_outcomes: See `PartialDelivery.codes`; None unless the email was delivered in part.
    """

    email_id: UUID
    tenant_id: str
    message_key: str
    channel: str
    status: Status
    delivery: Delivery | None
    lane: str
    topic: str | None
    wait_until: datetime | None
    wait_reason: str | None
    send_at: datetime | None
    expires_at: datetime | None
    redelivery_count: int
    attempt_count: int
    attempt_base: int
    was_uncertain: bool
    crash_count: int
    on_uncertain: str
    correlation_id: str | None
    traceparent: str | None
    error_type: str | None
    last_error: str | None
    provider: str | None
    provider_message_id: str | None
    locked_by: str | None
    locked_until: datetime | None
    created_at: datetime
    published_at: datetime | None
    leased_at: datetime | None
    sent_at: datetime | None
    settled_at: datetime | None
    publish_due_at: datetime | None
    dead_letter_due_at: datetime | None
    dead_lettered_at: datetime | None
    dead_letter_discarded_at: datetime | None
    recipient_outcomes: Mapping[str, str | None] | None
    resent_from: UUID | None
    resent_as: Sequence[UUID] | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One finished attempt to send an email through a provider. The times are by the clock of the sending host.

    Attributes:
        worker: None if it is hidden from the reader.
        answer: What the provider answered, if this is not an error.
    """

    attempt: int
    worker: str | None
    provider: str
    started_at: datetime
    finished_at: datetime
    outcome: str
    error_type: str | None
    provider_code: str | None
    error: str | None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class ProviderEvent:
    """What a provider reported about an email that the provider had accepted.

    Attributes:
        happened_at: When the event happened, by the provider's clock.
        kind: A kind from docs/events.md, such as `delivered`.
        bounce: The kind of bounce: `hard`, `soft` or `blocked`; None if the event is not a bounce.
        doubt: Why the event is not believed: `impossible`, `recipient`, or None.
        recipient: The recipient's number, counted from 1 through `to`, then `cc`, then `bcc`; None if unknown.
    """

    happened_at: datetime
    kind: str
    bounce: str | None
    provider: str
    code: str | None
    detail: str | None
    doubt: str | None
    received_at: datetime
    recipient: int | None


@dataclass(frozen=True, slots=True)
class AuditedAct:
    """An operator's action on an email."""

    acted_at: datetime
    actor: str
    action: str
    reason: str | None
    detail: Any


@dataclass(frozen=True, slots=True)
class ReplayOfEmail:
    """A replay that included an email, and what became of the email."""

    replay_id: int
    actor: str
    reason: str | None
    outcome: str | None
    settled_at: datetime | None


@dataclass(frozen=True, slots=True)
class Moment:
    """One entry of an email's timeline. Contains no private data: no content and no address.

    Attributes:
        what: What happened, in plain English, such as `enqueued`, `attempt 1: accepted`, or `released`.
        detail: Further facts, such as the provider and its answer.
        actor: The operator who acted; None if this was not an operator's action, or if it is hidden from the reader.
        reason: Why the operator acted.
    """

    at: datetime
    what: str
    detail: str | None = None
    actor: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Resent:
    """A copy of an email (see the action `resend`).

    Attributes:
        is_known: Whether an earlier call made the copy.
    """

    id: UUID
    message_key: str
    resent_from: UUID
    is_known: bool

    def describe(self) -> str:
        known = "was enqueued before" if self.is_known else "is enqueued"
        return f"The copy {known}: email {self.id}, message key {self.message_key}"


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """Why an email is not sent yet.

    Attributes:
        reason: A reason from docs/api.md, such as `provider_paused`.
        until: The latest time at which the wait ends, or the time of the next attempt; None if unknown.
    """

    reason: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class EmailStatus(ListedEmail):
    """An email's status, attempts, events and timeline.

    Attributes:
        delivered_recipients: The recipients who have an email that was delivered in part, by the same numbers as in
            `refused_recipients`: `1-2, 5`. None if the email is sent, or if nobody has it.
        resent_from: The email of which this one is a copy (see `resend`); `resent_as`: the copies of this email.
        waiting: Why the email is not sent yet; None unless its status is `pending`, `waiting` or `sending`.
    """

    topic: str | None = None
    delivered_recipients: str | None = None
    resent_from: UUID | None = None
    resent_as: Sequence[UUID] | None = None
    waiting: WaitStatus | None = None
    attempts: Sequence[Attempt] = ()
    events: Sequence[ProviderEvent] = ()
    timeline: Sequence[Moment] = ()


def label(name: str) -> str:
    """A column in words: `provider's id` for `provider_message_id`, `sent` for `sent_at`."""
    return _LABELS.get(name) or name.removesuffix("_id").removesuffix("_at").replace("_", " ")


def since(email: EmailRow) -> datetime | None:
    if email.status == Status.SENT:
        return email.sent_at
    return email.settled_at if email.status in FINISHED else None  # otherwise it belongs to an earlier status


def facts(email: EmailRow) -> dict[str, Any]:
    """What is known about an email, by its label: texts and times, without what does not apply to this email."""
    is_sent = email.status == Status.SENT
    refused = left_out(email.last_error) if is_sent else None
    delivered = delivered_recipients(email.status, email.recipient_outcomes)
    attempts = f"{email.attempt_count:,}"
    if base := email.attempt_base:
        attempts += f", {email.attempt_count - base:,} since the last replay, recovery or partial delivery"
    found = {label(name): getattr(email, name) for name in EmailRow.__match_args__ if name not in _EXPLAINED} | {
        # If the email is sent, the column contains the provider's answer, which is not an error.
        "answer" if is_sent else "last error": email.last_error,
        "delivery": email.delivery and email.delivery.words,
        "status since": None if is_sent else since(email),
        "attempts": attempts,
        "redeliveries": f"{email.redelivery_count:,}" if email.redelivery_count else None,
        "may have arrived": "yes: the outcome of an attempt is unknown" if email.was_uncertain else None,
        "crashes": f"{email.crash_count:,} while a worker rendered this email" if email.crash_count else None,
        "not sent to": refused
        and f"recipients {refused}, in the order To, Cc, Bcc: the provider refused these and accepted all others",
        "delivered to": delivered
        and f"recipients {delivered}, in the order To, Cc, Bcc: a further attempt leaves these out",
        "Message-ID": f"<{email.email_id}@…>, with the sender's domain"
        if provider_of(email.provider or "") in _KEEP_MESSAGE_ID
        else None,
        "leased until": email.locked_until if email.locked_by else None,
        "not before": email.wait_until,
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def columns(records: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Records as a table: the labels of its columns, and its rows. Leaves out what is empty in every record."""
    rows = list(records)
    names = [name for name in (rows[0] if rows else ()) if any(row[name] not in (None, [], {}) for row in rows)]
    return [label(name) for name in names], [[row[name] for name in names] for row in rows]
