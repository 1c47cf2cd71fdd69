"""Messages on their way to RabbitMQ as octets: what pika does with a dozen calls and objects per message, in one step.

A message is three frames (AMQP 0-9-1, section 4.2.3): the method, which is the same for all messages of a queue, a
header with the properties, and the body. Written here is what has no headers and fits one frame, as pointers and dead
letters do; all else is left to pika.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from pika import spec

from dispatcher.broker.outgoing import Outgoing

CONTENT_TYPE: Final = "application/json"
PERSISTENT: Final = 2

_FRAME: Final = struct.Struct(">BHL")
_METHOD: Final = struct.Struct(">LH")
_HEADER: Final = struct.Struct(">HHQH")
_MANDATORY: Final = b"\x01"
_END: Final = bytes((spec.FRAME_END,))
_FLAGS: Final = (
    spec.BasicProperties.FLAG_CONTENT_TYPE
    | spec.BasicProperties.FLAG_DELIVERY_MODE
    | spec.BasicProperties.FLAG_MESSAGE_ID
)
_FLAGS_CORRELATED: Final = _FLAGS | spec.BasicProperties.FLAG_CORRELATION_ID


def publication(channel_number: int, exchange: str, message: Outgoing, most_body_octets: int) -> bytes | None:
    """The frames of a persistent, mandatory message; None where pika has to write them."""
    body = message.body
    if message.traceparent or not 0 < len(body) <= most_body_octets:
        return None
    # In the order of the specification, section 4.2.6.1: content type, delivery mode, correlation id, message id.
    properties = _BEGIN
    flags = _FLAGS
    if message.correlation_id is not None:
        properties += _short(message.correlation_id)
        flags = _FLAGS_CORRELATED
    properties += _short(message.message_id)
    header = _HEADER.pack(spec.Basic.INDEX, 0, len(body), flags) + properties
    return b"".join(
        (
            _method(channel_number, exchange, message.queue),
            _FRAME.pack(spec.FRAME_HEADER, channel_number, len(header)),
            header,
            _END,
            _FRAME.pack(spec.FRAME_BODY, channel_number, len(body)),
            body,
            _END,
        )
    )


@lru_cache(maxsize=16)
def _method(channel_number: int, exchange: str, queue: str) -> bytes:
    payload = _METHOD.pack(spec.Basic.Publish.INDEX, 0) + _short(exchange) + _short(queue) + _MANDATORY
    return _FRAME.pack(spec.FRAME_METHOD, channel_number, len(payload)) + payload + _END


def _short(text: str) -> bytes:
    octets = text.encode()
    return bytes((len(octets),)) + octets


_BEGIN: Final = _short(CONTENT_TYPE) + bytes((PERSISTENT,))
