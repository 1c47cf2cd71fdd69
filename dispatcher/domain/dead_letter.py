"""A dead letter: the message on the DLQ for an email that failed or is held."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What a dead letter says about its failed or held email. `error_type` is a `domain.outcome.Reason`; `error` has no
    addresses."""

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
