"""The API's responses as values, and its problems as exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError


class ApiProblem(DispatcherError):
    """The API refused a request, or could not serve it.

    Attributes:
        status: The HTTP status.
        code: The problem's code, such as `invalid-email`; `unknown` if the response is not from the API.
        errors: The mistakes in the request. Each has `detail`, and `pointer`, `header` or `parameter`.
        retry_after: The seconds in the response's Retry-After header; None if the header is missing.
        email_status: With the code `too-late`, the email's status; otherwise None.
    """

    def __init__(self, status: int, document: Mapping[str, Any], retry_after: float | None = None) -> None:
        self.status = status
        self.code = str(document.get("code", "unknown"))
        self.errors: Sequence[Mapping[str, str]] = document.get("errors", ())
        self.retry_after = retry_after
        self.email_status = Status(document["email_status"]) if "email_status" in document else None
        where = "; ".join(": ".join(map(str, error.values())) for error in self.errors)
        words = [str(document.get("title", f"The HTTP status was {status}.")), str(document.get("detail", "")), where]
        super().__init__(" ".join(word for word in words if word))


class NoResponse(DispatcherError):
    """The last attempt of a call got no response. The email may have been enqueued; repeating the call is safe."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """An enqueued email.

    Attributes:
        is_known: Whether an earlier request had already enqueued the email.
        warnings: What the caller should know about a valid SMS, such as a character that makes it take more segments.
    """

    id: UUID
    message_key: str
    is_known: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """An email of a batch that the API refused."""

    problem: ApiProblem


@dataclass(frozen=True, slots=True)
class Attempt:
    """One finished attempt to send an email through a provider."""

    attempt: int
    provider: str
    started_at: datetime
    finished_at: datetime
    outcome: str
    error_type: str | None
    error: str | None
    provider_code: str | None


@dataclass(frozen=True, slots=True)
class ProviderEvent:
    """What a provider reported about an email that the provider had accepted.

    Attributes:
        kind: A kind from docs/events.md, such as `delivered`.
        bounce: The kind of bounce: `hard`, `soft` or `blocked`; None if the event is not a bounce.
        happened_at: When the event happened, by the provider's clock.
        recipient: The recipient's number, counted from 1 through `to`, then `cc`, then `bcc`; None if unknown.
    """

    kind: str
    bounce: str | None
    provider: str
    happened_at: datetime
    received_at: datetime
    recipient: int | None
    code: str | None
    detail: str | None


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """Why an email is not sent yet.

    Attributes:
        reason: A reason from docs/api.md, such as `provider_paused`.
        until: The latest time at which the wait ends, or the time of the next attempt; None if unknown.
    """

    reason: str
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Moment:
    """One entry of an email's timeline: what happened to the email, and when."""

    at: datetime
    what: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class EmailStatus:
    """An email's status, attempts, events and timeline.

    Attributes:
        waiting: Why the email is not sent yet; None unless its status is `pending`, `waiting` or `sending`.
        refused_recipients: The recipients who did not get the email, although the provider accepted it for others. Each
            has its number, counted through `to`, `cc` and `bcc`, and the reason: `2 (550 5.1.1), 3 (451)`. None if the
            provider accepted all recipients.
        delivered_recipients: The recipients who have an email that was delivered in part, by the same numbers:
            `1-2, 5`. None if the email is sent, or if nobody has it.
    """

    id: UUID
    message_key: str
    channel: str
    status: Status
    attempt_count: int
    correlation_id: str | None
    error_type: str | None
    error: str | None
    provider: str | None
    provider_message_id: str | None
    created_at: datetime
    sent_at: datetime | None
    refused_recipients: str | None
    delivered_recipients: str | None
    waiting: WaitStatus | None
    attempts: tuple[Attempt, ...]
    events: tuple[ProviderEvent, ...]
    timeline: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class ListedEmail:
    """An email in a list. `Client.get` returns the email's attempts and events, too.

    Attributes:
        refused_recipients: See `EmailStatus`.
    """

    id: UUID
    message_key: str
    channel: str
    status: Status
    attempt_count: int
    correlation_id: str | None
    error_type: str | None
    error: str | None
    provider: str | None
    provider_message_id: str | None
    created_at: datetime
    sent_at: datetime | None
    refused_recipients: str | None


@dataclass(frozen=True, slots=True)
class EmailPage:
    """A page of emails, newest first. A page may be short or empty even if more emails follow.

    Attributes:
        next: The cursor of the next page; None on the last page.
        recipients_since: Emails that were created before this time cannot be found by their recipients. None if all
            emails can be found, or if the request has no recipient and no domain.
    """

    emails: tuple[ListedEmail, ...]
    next: UUID | None
    recipients_since: datetime | None


def parse_receipt(document: Mapping[str, Any], *, is_known: bool) -> Receipt:
    """Parses the response to a request with one email."""
    return Receipt(UUID(document["id"]), document["message_key"], is_known, tuple(document.get("warnings", ())))


def parse_results(document: Mapping[str, Any]) -> list[Receipt | Refused]:
    """Parses the response to a batch: one result per email, in order."""
    return [
        Refused(ApiProblem(result["problem"]["status"], result["problem"]))
        if result["outcome"] == "refused"
        else parse_receipt(result["email"], is_known=result["outcome"] == "known")
        for result in document["results"]
    ]


def parse_status(document: Mapping[str, Any]) -> EmailStatus:
    """Parses an email's status. Ignores fields that this client does not know."""
    fields = _email_fields(EmailStatus, document)
    fields["waiting"] = _waiting(document["waiting"]) if document.get("waiting") else None
    fields["attempts"] = tuple(_attempt(attempt) for attempt in document["attempts"])
    fields["events"] = tuple(_provider_event(event) for event in document.get("events", ()))
    fields["timeline"] = tuple(
        Moment(datetime.fromisoformat(moment["at"]), moment["what"], moment.get("detail"))
        for moment in document.get("timeline", ())
    )
    return EmailStatus(**fields)


def parse_page(document: Mapping[str, Any]) -> EmailPage:
    """Parses a page of emails. Ignores fields that this client does not know."""
    emails = tuple(ListedEmail(**_email_fields(ListedEmail, email)) for email in document["emails"])
    since = document.get("recipients_since")
    return EmailPage(
        emails, UUID(document["next"]) if document["next"] else None, datetime.fromisoformat(since) if since else None
    )


def _email_fields(kind: type[EmailStatus | ListedEmail], document: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {name: document.get(name) for name in kind.__dataclass_fields__}
    fields["id"] = UUID(document["id"])
    fields["channel"] = document.get("channel") or "email"  # an older API supports only email, and sends no channel
    fields["status"] = Status(document["status"])
    fields["created_at"] = datetime.fromisoformat(document["created_at"])
    fields["sent_at"] = datetime.fromisoformat(document["sent_at"]) if document["sent_at"] else None
    return fields


def _waiting(document: Mapping[str, Any]) -> WaitStatus:
    until = document.get("until")
    return WaitStatus(document["reason"], datetime.fromisoformat(until) if until else None)


def _attempt(document: Mapping[str, Any]) -> Attempt:
    fields: dict[str, Any] = {name: document.get(name) for name in Attempt.__dataclass_fields__}
    for name in ("started_at", "finished_at"):
        fields[name] = datetime.fromisoformat(document[name])
    return Attempt(**fields)


def _provider_event(document: Mapping[str, Any]) -> ProviderEvent:
    fields: dict[str, Any] = {name: document.get(name) for name in ProviderEvent.__dataclass_fields__}
    for name in ("happened_at", "received_at"):
        fields[name] = datetime.fromisoformat(document[name])
    return ProviderEvent(**fields)


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """An event of the feed: an email's new status, or what a provider reported about the email.

    Attributes:
        id: The event's id, which is the same in every response and in webhooks.
        cursor: `events(after=cursor)` continues after this event.
        type: `email.sent`, `email.failed`, `email.held`, `email.cancelled`, `email.delivered`, `email.bounced`,
            `email.complained` or `email.suppressed`. Later releases may have more types.
        timestamp: When the event was recorded.
        reason: Why the email failed or is held.
        code: The status code of the provider, or of the recipient's server.
        bounce: `hard`, `soft` or `blocked`; None unless the email bounced.
        happened_at: When the event happened; by the provider's clock if a provider reported the event.
    """

    id: UUID
    cursor: str
    type: str
    timestamp: datetime
    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    provider: str | None
    reason: str | None
    code: str | None
    bounce: str | None
    happened_at: datetime


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of events, oldest first.

    Attributes:
        next: The cursor for the next request.
        has_more: Whether to request the next page immediately. If false, wait a few seconds first.
    """

    events: tuple[FeedEvent, ...]
    next: str
    has_more: bool


def parse_events(document: Mapping[str, Any]) -> EventPage:
    """Parses a page of events. Ignores fields that this client does not know."""
    events = tuple(_feed_event(event) for event in document["events"])
    return EventPage(events, document["next"], document["has_more"])


def _feed_event(document: Mapping[str, Any]) -> FeedEvent:
    data = document["data"]
    fields: dict[str, Any] = {name: data.get(name) for name in FeedEvent.__dataclass_fields__}
    fields |= {"id": UUID(document["id"]), "cursor": document["cursor"], "type": document["type"]}
    fields["timestamp"] = datetime.fromisoformat(document["timestamp"])
    fields["email_id"] = UUID(data["email_id"])
    fields["happened_at"] = datetime.fromisoformat(data["happened_at"])
    return FeedEvent(**fields)
