"""A message on its way to a queue: bytes and the few properties that tools and traces need."""

from __future__ import annotations

from typing import Final

from dispatcher.broker import dead_letter, pointer
from dispatcher.broker.dead_letter import DeadLetter
from dispatcher.broker.pointer import Pointer
from dispatcher.domain.values import value

_MAX_SHORT_STRING_OCTETS: Final = 255
"""AMQP 0-9-1, section 4.2.5.3."""


@value
class Outgoing:
    """A message to publish.

    Attributes:
        queue: Its queue's name, which is its routing key too.
        message_id: The email's id.
        correlation_id: None too where it is longer than AMQP's property holds (255 octets); the email's row has it.
        traceparent: W3C trace context, for the header of that name.
    """

    queue: str
    body: bytes
    message_id: str
    correlation_id: str | None = None
    traceparent: str | None = None

    @classmethod
    def of_pointer(cls, queue: str, due: Pointer) -> Outgoing:
        """The message that makes a worker send an email."""
        message_id, correlation_id = pointer.id_text(due.email_id), _short(due.correlation_id)
        return cls(queue, pointer.encode(due), message_id, correlation_id, due.traceparent)

    @classmethod
    def of_dead_letter(cls, dlq: str, told: DeadLetter, traceparent: str | None = None) -> Outgoing:
        """The message that tells of an email that failed or is held."""
        return cls(dlq, dead_letter.encode(told), str(told.email_id), _short(told.correlation_id), traceparent)


def _short(text: str | None) -> str | None:
    return text if text is not None and len(text.encode()) <= _MAX_SHORT_STRING_OCTETS else None
