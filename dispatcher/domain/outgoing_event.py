"""The events of the feed, which report to applications what became of their emails."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.values import dataclass


class OutgoingKind(StrEnum):
    """What became of an email; the value of `outgoing_event.kind`."""

    SENT = "sent"
    """A provider accepted the email."""
    FAILED = "failed"
    """The email was rejected, or no attempts are left."""
    HELD = "held"
    """It is unknown whether the provider accepted the email."""
    DELIVERED = "delivered"
    """The recipient's server took the email."""
    BOUNCED = "bounced"
    """The recipient's server refused the email for good."""
    COMPLAINED = "complained"
    """The recipient reported the email as spam."""
    SUPPRESSED = "suppressed"
    """The email failed because all of its recipients are suppressed."""
    CANCELLED = "cancelled"
    """The email will not be sent: it has expired, or the application or an operator cancelled it."""

    @property
    def type(self) -> str:
        """The kind's name in the HTTP API and in webhooks, such as `email.sent`."""
        return f"{TYPE_PREFIX}{self.value}"


TYPE_PREFIX: Final = "email."
TYPES: Final = tuple(kind.type for kind in OutgoingKind)


def kind_of(text: str) -> OutgoingKind:
    """The kind with this name, such as `email.sent` or `sent`. Raises ValueError."""
    try:
        return OutgoingKind(text.removeprefix(TYPE_PREFIX))
    except ValueError:
        raise ValueError(f"must be one of: {', '.join(TYPES)}") from None


@dataclass(frozen=True, slots=True)
class OutgoingEvent:
    """One event of the feed. Contains neither the email's content nor an address.

    `event_id` is the same in each delivery, so that a receiver can ignore repetitions. `reason` is a
    `domain.outcome.Reason`, `code` the status code of the provider or the recipient's server, `bounce` is `hard`,
    `soft` or `blocked`. `address_hash` is None if the event is about all recipients. `happened_at`, by the provider's
    clock, is None for a change of status.
    """

    event_id: UUID
    kind: OutgoingKind
    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    reason: str | None
    provider: str | None
    code: str | None
    bounce: str | None
    address_hash: bytes | None
    happened_at: datetime | None
    created_at: datetime

    def document(self, recipients: Sequence[str] | None = None) -> dict[str, Any]:
        """The event as JSON, with these addresses: `type`, `timestamp` and `data`, according to Standard Webhooks."""
        data: dict[str, Any] = {
            "email_id": str(self.email_id),
            "tenant_id": self.tenant_id,
            "message_key": self.message_key,
            "correlation_id": self.correlation_id,
            "provider": self.provider,
            "reason": self.reason,
            "code": self.code,
            "bounce": self.bounce,
            "happened_at": self.happened_at or self.created_at,
        }
        if recipients is not None:
            data["recipients"] = list(recipients)
        return {"type": self.kind.type, "timestamp": self.created_at, "data": data}
