"""An email in a list: what every face shows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypedDict
from uuid import UUID

from dispatcher.domain.event import Delivery
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass

Envelope = TypedDict(
    "Envelope", {"from": str, "to": list[str], "cc": list[str], "bcc": list[str], "subject": str | None}
)
"""From whom and to whom an email is, and about what. Private."""


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The newest believed event of an email, by the provider's clock."""

    kind: str
    at: datetime


@dataclass(frozen=True, slots=True)
class ListedEmail:
    """An email without content and addresses, except for readers with the scope `content`.

    Attributes:
        delivery: What became of it after a provider accepted it; None if no event says whether it arrived.
        error: The last error; None if the provider accepted the email.
        answer: The provider's answer, if the provider accepted the email.
        settled_at: When the email became failed, held or cancelled.
        send_at: Since when the email may be sent, if not since `created_at`: its schedule, or its last replay.
        tags: None if it has none, or if the content was deleted.
        metadata: The application's own keys and values; None as for `tags`.
        recipients: The masked recipients; None if the content was deleted.
        envelope: None if the content was deleted, or if the reader's key does not have the scope `content`.
        refused_recipients: Those that the provider refused when it accepted the email, by position and code.
    """

    id: UUID
    tenant_id: str
    message_key: str
    status: Status
    delivery: Delivery | None
    lane: str
    attempt_count: int
    correlation_id: str | None
    error_type: str | None
    error: str | None
    provider: str | None
    provider_message_id: str | None
    created_at: datetime
    sent_at: datetime | None
    settled_at: datetime | None
    channel: str
    send_at: datetime | None
    expires_at: datetime | None
    answer: str | None = None
    tags: Sequence[str] | None = None
    metadata: Mapping[str, str] | None = None
    last_event: LastEvent | None = None
    recipients: Sequence[str] | None = None
    envelope: Envelope | None = None
    refused_recipients: str | None = None
