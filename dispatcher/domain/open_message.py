"""A message whose end is unknown, as a provider is asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Traits:
    """What identifies a held message in a provider's list. Nothing of it may be logged.

    Attributes:
        sender: Empty: the provider's default sender.
        accepted_from: With `accepted_until`, when the provider can have accepted the message. Allows for clocks that
            differ.
        other_ids: The provider's ids of other messages to the same recipient.
    """

    recipient: str = field(repr=False)
    sender: str = field(repr=False)
    text: str = field(repr=False)
    accepted_from: datetime
    accepted_until: datetime
    other_ids: list[str]


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A message that a provider accepted and has reported no end of, or a held message.

    Attributes:
        message_id: The provider's id; None for a held message, which the provider may not have accepted.
        traits: Set if, and only if, there is no `message_id`.
    """

    email_id: UUID
    message_id: str | None
    traits: Traits | None = None
