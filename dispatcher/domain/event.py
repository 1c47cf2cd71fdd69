"""Events: what providers report after they accepted an email, what we ask them about, and what the feed reports to
applications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final, Self
from uuid import UUID

from dispatcher.domain.accounts import provider_of
from dispatcher.domain.values import dataclass, field


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


OF_TOPIC: Final = "group"
"""The code of an event `unsubscribed`, if the recipient left only emails of one kind: the topic of the email. Without
this code, the recipient wants no email of the sender."""


class Bounce(StrEnum):
    """How permanent a bounce is. The value of `email_event.bounce`."""

    HARD = "hard"
    """The address does not exist or accepts no email. A later email would bounce, too."""
    SOFT = "soft"
    """The mailbox is full, or the message was too large. A later email may arrive."""
    BLOCKED = "blocked"
    """The receiving server refuses the sender, for example by reputation. The address may be valid."""


class Delivery(StrEnum):
    """What became of an email after a provider accepted it, by what the providers reported. The value of
    `email_log.delivery`, in the same order: the last of what its events say counts, whichever recipients they concern,
    and in whichever order they arrive. No value: no event says whether the email arrived."""

    DELAYED = "delayed"
    """A recipient's server refused the email for now. The provider tries again."""
    DELIVERED = "delivered"
    OPENED = "opened"
    CLICKED = "clicked"
    UNSUBSCRIBED = "unsubscribed"
    BOUNCED_SOFT = "bounced_soft"
    """See `Bounce`, also for the other two."""
    BOUNCED_BLOCKED = "bounced_blocked"
    REJECTED = "rejected"
    """The provider took the email, and did not send it on."""
    BOUNCED_HARD = "bounced_hard"
    COMPLAINED = "complained"

    @classmethod
    def of(cls, kind: str, bounce: str | None) -> Self | None:
        """What an event says; None if it says nothing about delivery. As the function `email_delivery_of`."""
        if kind == EventKind.ACCEPTED:
            return None
        return cls(cls.DELAYED if kind == EventKind.DEFERRED else f"{kind}_{bounce}" if bounce else kind)

    @property
    def words(self) -> str:
        """For people: `bounced (hard)`."""
        kind, _, bounce = self.value.partition("_")
        return f"{kind} ({bounce})" if bounce else kind

    @property
    def has_failed(self) -> bool:
        """Whether a recipient does not have the email, or did not want it."""
        return self in (*BOUNCES, Delivery.REJECTED, Delivery.COMPLAINED)


BOUNCES: Final = (Delivery.BOUNCED_SOFT, Delivery.BOUNCED_BLOCKED, Delivery.BOUNCED_HARD)
NO_DELIVERY: Final = "none"
"""The word for no value."""
DELIVERY_FILTERS: Final[Mapping[str, Sequence[str]]] = {
    NO_DELIVERY: (NO_DELIVERY,),
    "bounced": BOUNCES,
    **{each.value: (each.value,) for each in Delivery},
}
"""The words that select emails by their delivery state, and the states that each selects."""
TROUBLE: Final[Mapping[str, EventKind]] = {
    Delivery.DELAYED: EventKind.DEFERRED,
    Delivery.REJECTED: EventKind.REJECTED,
    Delivery.COMPLAINED: EventKind.COMPLAINED,
    **dict.fromkeys(("bounced", *BOUNCES), EventKind.BOUNCED),
}
"""The words that select few emails, and the kind of event that each of these emails has: the index email_event_trouble
has these kinds."""


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

        The key does not contain the provider's event id, because providers may repeat an event with a new id; nor the
        account, because an operator may have named it in the meantime.
        `address_hash`: that of `recipient`; None if the event has no recipient.
        """
        instant = f"{self.happened_at.timestamp():.3f}" if self.is_dated else ""
        parts = (provider_of(self.provider), self.kind, (address_hash or b"").hex(), instant, self.distinction)
        return sha256("\n".join(parts).encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class ReportedEvent:
    """What a provider reported about an email, without the recipient, as operators see it."""

    received_at: datetime
    email_id: UUID
    event_key: str  # hexadecimal octets
    happened_at: datetime  # when the event happened, by the provider's clock
    provider: str
    kind: str
    bounce: str | None
    code: str | None
    detail: str | None
    doubt: str | None  # what the event does not prove (docs/events.md); None if it proves what it says
    tenant_id: str
    message_key: str


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties by which we find a held message in a provider's list of messages. They must not be logged."""

    recipient: str = field(repr=False)
    sender: str = field(repr=False)  # the sender; empty if the message was sent with the provider's default sender
    text: str = field(repr=False)
    # The earliest time at which the provider can have accepted the message. This time and `accepted_until` allow for
    # a difference between our clock and the provider's.
    accepted_from: datetime
    accepted_until: datetime  # the latest time at which the provider can have accepted the message
    # The provider's ids of other messages to the same recipient. The message has none of these ids.
    other_ids: list[str]


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A message about which we ask the provider: it was accepted but no final event arrived, or it is held."""

    email_id: UUID
    # the provider's id; None for a held message, because it is unknown whether the provider accepted it
    message_id: str | None
    traits: Traits | None = None  # the properties to search for; None if there is a `message_id`


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
    DELAYED = "delayed"
    """The recipient's server refused the email for now."""
    REJECTED = "rejected"
    """The provider took the email, and did not send it on."""
    OPENED = "opened"
    CLICKED = "clicked"
    UNSUBSCRIBED = "unsubscribed"

    @property
    def type(self) -> str:
        """The kind's name in the HTTP API and in webhooks, such as `email.sent`."""
        return f"{TYPE_PREFIX}{self.value}"


TYPE_PREFIX: Final = "email."
TYPES: Final = tuple(kind.type for kind in OutgoingKind)
DEFAULT_KINDS: Final = tuple(OutgoingKind)[: tuple(OutgoingKind).index(OutgoingKind.DELAYED)]
"""What the feed and a webhook report unless they name kinds: what decides about an email."""


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
    clock, is None for a change of status. `metadata` is None if the email has none, or its content was deleted. `topic`
    is what the recipient left; None if the recipient left all topics, or if this is no event `unsubscribed`.
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
    metadata: Mapping[str, str] | None = None
    topic: str | None = None

    def document(self, recipients: Sequence[str] | None = None) -> dict[str, Any]:
        """The event as JSON, with these addresses: `type`, `timestamp` and `data`, according to Standard Webhooks."""
        data: dict[str, Any] = {
            "email_id": str(self.email_id),
            "tenant_id": self.tenant_id,
            "message_key": self.message_key,
            "correlation_id": self.correlation_id,
            "metadata": self.metadata,
            "topic": self.topic,
            "provider": self.provider,
            "reason": self.reason,
            "code": self.code,
            "bounce": self.bounce,
            "happened_at": self.happened_at or self.created_at,
        }
        if recipients is not None:
            data["recipients"] = list(recipients)
        return {"type": self.kind.type, "timestamp": self.created_at, "data": data}
