"""Events that a provider reports after it accepted an email: delivered, bounced, complained about."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from uuid import UUID

from dispatcher.domain.values import dataclass


class EventKind(StrEnum):
    """What happened to an email, in the vocabulary of django-anymail. The value of `email_event.kind`."""

    ACCEPTED = "accepted"
    """The provider took the email. The provider may still drop the email."""
    DELIVERED = "delivered"
    """The recipient's server took the email. A bounce may still follow."""
    DEFERRED = "deferred"
    """The recipient's server refused the email for now. The provider tries again."""
    BOUNCED = "bounced"
    """The recipient's server refused the email, and the provider does not try again."""
    COMPLAINED = "complained"
    """The recipient reported the email as spam."""
    REJECTED = "rejected"
    """The provider took the email and then refused to send it, for example because of its own suppression list."""
    UNSUBSCRIBED = "unsubscribed"
    OPENED = "opened"
    CLICKED = "clicked"


class Bounce(StrEnum):
    """How permanent a bounce is. The value of `email_event.bounce`."""

    HARD = "hard"
    """The address does not exist or accepts no email. A later email would bounce, too."""
    SOFT = "soft"
    """The mailbox is full, or the message was too large. A later email may arrive."""
    BLOCKED = "blocked"
    """The receiving server refuses the sender, for example by reputation. The address may be valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEvent:
    """One event for one recipient of one email.

    Attributes:
        provider: The name of the provider that reported the event, such as `sendgrid`.
        happened_at: When the event happened, by the provider's clock, with a time zone.
        recipient: The address in clear text. It must not be logged, and only its hash is stored. None if the event
            does not say which recipient it concerns.
        bounce: Set if, and only if, the kind is BOUNCED.
        code: The status code of the receiving server or of the provider, such as `5.1.1`.
        detail: The provider's explanation. It is scrubbed of addresses before it is stored, and must not be logged.
        distinction: Distinguishes this event from other events of the same kind, recipient and instant, such as the URL
            of a click.
        is_dated: Whether `happened_at` distinguishes this event from others. False if the provider does not say when
            the event happened, or if anyone can choose this time.
    """

    email_id: UUID
    provider: str
    kind: EventKind
    happened_at: datetime
    recipient: str | None = None
    bounce: Bounce | None = None
    code: str | None = None
    detail: str | None = None
    distinction: str = ""
    is_dated: bool = True

    def key(self, address_hash: bytes | None) -> bytes:
        """16 bytes that identify the event within its email, so that a repeated event is stored once.

        The key does not contain the provider's event id, because providers may repeat an event with a new id.

        Args:
            address_hash: The hash of `recipient`; None if the event has no recipient.
        """
        instant = f"{self.happened_at.timestamp():.3f}" if self.is_dated else ""
        parts = (self.provider, self.kind, (address_hash or b"").hex(), instant, self.distinction)
        return sha256("\n".join(parts).encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class ReportedEvent:
    """What a provider reported about an email, without the recipient, as operators see it.

    Attributes:
        event_key: Hexadecimal octets.
        happened_at: When the event happened, by the provider's clock.
        doubt: What the event does not prove (docs/events.md); None if it proves what it says.
    """

    received_at: datetime
    email_id: UUID
    event_key: str
    happened_at: datetime
    provider: str
    kind: str
    bounce: str | None
    code: str | None
    detail: str | None
    doubt: str | None
    tenant_id: str
    message_key: str
