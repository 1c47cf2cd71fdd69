"""The API's responses as values, and its problems as exceptions. A response may have fields that a value lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.actions.emails import FoundPage
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
    is_known: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """An email of a batch that the API refused."""

    problem: ApiProblem


EmailPage = FoundPage


@dataclass(frozen=True, slots=True)
class WebhookTest:
    """The answer of a webhook's receiver to a test event."""

    is_accepted: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
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
    correlation_id: str | None = None
    provider: str | None = None
    reason: str | None = None
    code: str | None = None
    bounce: str | None = None
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
