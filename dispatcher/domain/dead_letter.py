"""A dead letter: the message on the DLQ for an email that failed or is held."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.domain.status import Status


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A failed or held email. Only an operator or evidence can change its status.

    Attributes:
        status: `failed` or `held`.
        error_type: A value of `domain.outcome.Reason`.
        error: The provider's error text or ours, without addresses.
        attempts: The number of attempts.
        provider: The provider of the last attempt.
        failed_at: When the email became `failed` or `held`.
    """

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    status: Status
    error_type: str | None
    error: str | None
    attempts: int
    provider: str | None
    created_at: datetime
    failed_at: datetime
    channel: str = EMAIL_CHANNEL
