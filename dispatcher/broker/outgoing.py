"""A message on its way to a queue: bytes and the few properties that tools and traces need."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        message_id: The email's id; of several, the first one's.
        correlation_id: None too where it is longer than AMQP's property holds (255 octets), or of several emails; their
            rows have it.
        traceparent: W3C trace context, for the header of that name; None likewise.
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
    def of_pointers(cls, queue: str, due: Sequence[Pointer], most: int) -> tuple[list[Outgoing], list[int]]:
        """The messages that make workers send emails.

        Args:
            most: Emails that one of them points to.

        Returns:
            The messages, in the order of the emails, about as large as one another; and for each email its message's
            index.
        """
        size = _even(len(due), most)
        starts = range(0, len(due), size)
        return [cls._of_bundle(queue, due[at : at + size]) for at in starts], [at // size for at in range(len(due))]

    @classmethod
    def _of_bundle(cls, queue: str, due: Sequence[Pointer]) -> Outgoing:
        if len(due) == 1:
            return cls.of_pointer(queue, due[0])
        return cls(queue, pointer.encode_bundle(due), pointer.id_text(due[0].email_id))

    @classmethod
    def of_dead_letter(cls, dlq: str, told: DeadLetter, traceparent: str | None = None) -> Outgoing:
        """The message that tells of an email that failed or is held."""
        return cls(dlq, dead_letter.encode(told), str(told.email_id), _short(told.correlation_id), traceparent)


def _even(count: int, most: int) -> int:
    """The size of as few shares as it takes: 18 by 16 are 9 and 9, so that no worker idles beside one that does not."""
    shares = math.ceil(count / most)
    return math.ceil(count / shares) if shares else most


def _short(text: str | None) -> str | None:
    return text if text is not None and len(text.encode()) <= _MAX_SHORT_STRING_OCTETS else None
