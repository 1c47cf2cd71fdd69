"""A dead letter: what the DLQ holds of an email that failed or is held."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dispatcher.domain.status import Status


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An email that no machine will touch again.

    Attributes:
        status: `failed` or `held`.
        error_type: A word of `domain.outcome.Reason`.
        error: In the provider's or our words, scrubbed of addresses.
        attempts: How many provider calls there were.
        provider: Whom the last one went to.
        failed_at: When it became `failed` or `held`.
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
