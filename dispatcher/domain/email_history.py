"""What is known about one email, as the database has it, and as callers see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.domain.listed_email import ListedEmail
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass


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
    lane: str
    wait_until: datetime | None
    wait_reason: str | None
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


@dataclass(frozen=True, slots=True)
class Attempt:
    """One finished attempt to send an email through a provider. The times are by the clock of the sending host.

    Attributes:
        worker: None if it is hidden from the reader.
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
        waiting: Why the email is not sent yet; None unless its status is `pending`, `waiting` or `sending`.
    """

    delivered_recipients: str | None = None
    waiting: WaitStatus | None = None
    attempts: Sequence[Attempt] = ()
    events: Sequence[ProviderEvent] = ()
    timeline: Sequence[Moment] = ()
