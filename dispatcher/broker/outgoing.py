"""A message to publish: its body, the properties that tools and traces need, and its encoding as AMQP frames.

pika needs a dozen calls and objects to write a message. This module writes it in one step, as frames (AMQP 0-9-1,
section 4.2.3): the method, which is the same for all messages to a queue, a header with the properties, and the body.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from pika import spec

from dispatcher.broker import dead_letter, pointer
from dispatcher.broker.pointer import Pointer
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.values import value

_MAX_SHORT_STRING_OCTETS: Final = 255
"""The limit of AMQP 0-9-1 for a short string, such as a correlation id (section 4.2.5.3)."""
_PERSISTENT: Final = b"\x02"
_MANDATORY: Final = b"\x01"
_FRAME: Final = struct.Struct(">BHL")
_METHOD: Final = struct.Struct(">LH")
_HEADER: Final = struct.Struct(">HHQH")
_LENGTH: Final = struct.Struct(">L")
_END: Final = bytes((spec.FRAME_END,))
_BASIC: Final = spec.Basic.INDEX
_HEADER_FRAME: Final = spec.FRAME_HEADER
_BODY_FRAME: Final = spec.FRAME_BODY
_FLAG_CORRELATION_ID: Final = spec.BasicProperties.FLAG_CORRELATION_ID
_FLAGS: Final = (
    spec.BasicProperties.FLAG_CONTENT_TYPE
    | spec.BasicProperties.FLAG_DELIVERY_MODE
    | spec.BasicProperties.FLAG_MESSAGE_ID
)


@value
class Outgoing:
    queue: str  # also the routing key
    body: bytes
    message_id: str  # the email's id; for a bundle, the id of its first email
    correlation_id: str | None = None  # None for a bundle, and if it is missing or longer than 255 octets
    traceparent: str | None = None  # for the header of this name; None for a bundle, and if it is missing or too long

    @classmethod
    def of_pointer(cls, queue: str, due: Pointer) -> Outgoing:
        message_id, correlation_id = pointer.id_text(due.email_id), _short(due.correlation_id)
        return cls(queue, pointer.encode(due), message_id, correlation_id, _short(due.traceparent))

    @classmethod
    def of_pointers(cls, queue: str, due: Sequence[Pointer], most: int) -> tuple[list[Outgoing], list[int]]:
        """The messages that make workers send these emails; and for each email, the index of its message."""
        # As few bundles as possible, of equal size. With at most 16 emails per bundle, 18 emails become two bundles of
        # 9, and not 16 and 2. So two workers finish at the same time.
        size = math.ceil(len(due) / math.ceil(len(due) / most)) if due else most
        starts = range(0, len(due), size)
        return [cls._of_bundle(queue, due[at : at + size]) for at in starts], [at // size for at in range(len(due))]

    @classmethod
    def _of_bundle(cls, queue: str, due: Sequence[Pointer]) -> Outgoing:
        if len(due) == 1:
            return cls.of_pointer(queue, due[0])
        return cls(queue, pointer.encode_bundle(due), pointer.id_text(due[0].email_id))

    @classmethod
    def of_dead_letter(cls, dlq: str, failure: DeadLetter, traceparent: str | None = None) -> Outgoing:
        message_id, correlation_id = str(failure.email_id), _short(failure.correlation_id)
        return cls(dlq, dead_letter.encode(failure), message_id, correlation_id, _short(traceparent))

    def frames(self, channel_number: int, exchange: str, most_body_octets: int) -> bytes:
        """The frames that publish this message as persistent and mandatory."""
        # The properties are in the order of AMQP's section 4.2.6.1: content type, headers, delivery mode, correlation
        # id, message id.
        flags, properties = _FLAGS, _TYPE_AND_MODE
        if self.traceparent:
            flags |= spec.BasicProperties.FLAG_HEADERS
            table = _short_string(pointer.TRACEPARENT) + b"S" + _long(self.traceparent.encode())
            properties = _TYPE + _long(table) + _PERSISTENT
        if self.correlation_id is not None:
            flags |= _FLAG_CORRELATION_ID
            properties += _short_string(self.correlation_id)
        body = self.body
        header = _HEADER.pack(_BASIC, 0, len(body), flags) + properties + _short_string(self.message_id)
        header = _FRAME.pack(_HEADER_FRAME, channel_number, len(header)) + header + _END
        method = _method(channel_number, exchange, self.queue)
        if 0 < len(body) <= most_body_octets:  # usually, the body fits into one frame
            return b"".join((method, header, _FRAME.pack(_BODY_FRAME, channel_number, len(body)), body, _END))
        pieces = [body[at : at + most_body_octets] for at in range(0, len(body), most_body_octets)]
        frames = [_FRAME.pack(_BODY_FRAME, channel_number, len(piece)) + piece + _END for piece in pieces]
        return b"".join((method, header, *frames))


def _short(text: str | None) -> str | None:
    return text if text is not None and len(text.encode()) <= _MAX_SHORT_STRING_OCTETS else None


@lru_cache(maxsize=16)
def _method(channel_number: int, exchange: str, queue: str) -> bytes:
    payload = _METHOD.pack(spec.Basic.Publish.INDEX, 0) + _short_string(exchange) + _short_string(queue) + _MANDATORY
    return _FRAME.pack(spec.FRAME_METHOD, channel_number, len(payload)) + payload + _END


def _short_string(text: str) -> bytes:
    octets = text.encode()
    return bytes((len(octets),)) + octets


def _long(octets: bytes) -> bytes:
    return _LENGTH.pack(len(octets)) + octets


_TYPE: Final = _short_string("application/json")
_TYPE_AND_MODE: Final = _TYPE + _PERSISTENT
