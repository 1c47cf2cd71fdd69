"""A message that is held, or for which no final event has arrived. We ask the provider what became of the message.

Here, a message is an SMS or another row that is not an email."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from dispatcher.domain.values import dataclass, field


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties by which we find a held message in a provider's list of messages. They must not be logged.

    Attributes:
        sender: The sender; empty if the message was sent with the provider's default sender.
        accepted_from: The earliest time at which the provider can have accepted the message. This time and
            `accepted_until` allow for a difference between our clock and the provider's.
        accepted_until: The latest time at which the provider can have accepted the message.
        other_ids: The provider's ids of other messages to the same recipient. The message has none of these ids.
    """

    recipient: str = field(repr=False)
    sender: str = field(repr=False)
    text: str = field(repr=False)
    accepted_from: datetime
    accepted_until: datetime
    other_ids: list[str]


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A message about which we ask the provider: it was accepted but no final event arrived, or it is held.

    Attributes:
        message_id: The provider's id; None for a held message, because it is unknown whether the provider accepted it.
        traits: The properties to search for; None if there is a `message_id`.
    """

    email_id: UUID
    message_id: str | None
    traits: Traits | None = None
