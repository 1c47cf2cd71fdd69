"""An email in a list: what every face shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from dispatcher.domain.event import Delivery
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass


@dataclass(frozen=True, slots=True)
class ListedEmail:
    """An email without content and addresses.

    Attributes:
        delivery: What became of it after a provider accepted it; None if no event says whether it arrived.
        error: The last error; None if the provider accepted the email.
        settled_at: When the email became failed, held or cancelled.
        recipients: The masked recipients; None if the content was deleted.
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
    recipients: Sequence[str] | None = None
    refused_recipients: str | None = None
