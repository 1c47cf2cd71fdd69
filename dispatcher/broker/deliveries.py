"""Reads deliveries and writes acks as bytes, in one step. pika needs a dozen calls and objects per frame.

A delivery has three frames (AMQP 0-9-1, section 4.2.3): method, header with properties, and body. This module reads a
delivery only if all its frames have arrived, and if its only properties are those that our publisher sets and the
headers that RabbitMQ adds on redelivery. pika handles everything else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from pika import data, exceptions, spec

UNREADABLE: Final = (
    exceptions.AMQPError, ValueError, ArithmeticError, LookupError, OSError, RecursionError, struct.error,
)  # fmt: skip
"""The exceptions that pika raises if it cannot decode a header that another client wrote, such as a timestamp in
milliseconds."""

_DELIVER: Final = struct.pack(">L", spec.Basic.Deliver.INDEX)
_FRAME: Final = struct.Struct(">BHL")
_TAG: Final = struct.Struct(">QB")
_HEADER: Final = struct.Struct(">BHLHHQH")
_ACK: Final = struct.Struct(">BHLLQBB")
_ACK_OCTETS: Final = 13
_BASIC: Final = spec.BasicProperties.INDEX
_END: Final = spec.FRAME_END
_READ: Final = (
    spec.BasicProperties.FLAG_CONTENT_TYPE
    | spec.BasicProperties.FLAG_HEADERS
    | spec.BasicProperties.FLAG_DELIVERY_MODE
    | spec.BasicProperties.FLAG_CORRELATION_ID
    | spec.BasicProperties.FLAG_MESSAGE_ID
)


class DeliveryFrame(NamedTuple):
    """A delivery, with all fields of its method and properties that `consumer` reads."""

    end: int  # the offset at which the delivery ends in the buffer
    channel_number: int
    consumer_tag: str
    delivery_tag: int
    redelivered: bool
    body: bytes
    table: bytes | None = None  # the encoded headers

    @property
    def headers(self) -> Any:
        """The headers, decoded on demand; None if the message has none, or pika cannot decode them."""
        if self.table is None:
            return None
        try:
            return data.decode_table(self.table, 0)[0]
        except UNREADABLE:
            return None


def delivery_at(buffer: bytes, at: int) -> DeliveryFrame | None:
    """The delivery at this offset; None if pika must read the frames there."""
    try:
        kind, channel_number, octets = _FRAME.unpack_from(buffer, at)
        if kind != spec.FRAME_METHOD or buffer[at + 7 : at + 11] != _DELIVER:
            return None
        method_end = at + 7 + octets
        tag_at = at + 12 + buffer[at + 11]
        delivery_tag, bits = _TAG.unpack_from(buffer, tag_at)
        header_at = method_end + 1
        kind, _, octets, of_class, _, body_octets, flags = _HEADER.unpack_from(buffer, header_at)
        if kind != spec.FRAME_HEADER or of_class != _BASIC or flags & ~_READ:
            return None
        header_end = header_at + 7 + octets
        body_at = header_end + 8
        kind, _, octets = _FRAME.unpack_from(buffer, header_end + 1)
        # If the body has several frames, pika must read the delivery. This is rare, because our messages usually fit
        # into one frame.
        if kind != spec.FRAME_BODY or octets != body_octets:
            return None
        body_end = body_at + octets
        if not buffer[method_end] == buffer[header_end] == buffer[body_end] == _END:
            return None
        return DeliveryFrame(
            body_end + 1,
            channel_number,
            buffer[at + 12 : tag_at].decode(),
            delivery_tag,
            bool(bits & 1),
            buffer[body_at:body_end],
            _table(buffer, header_at + _HEADER.size, header_end, flags),
        )
    except (struct.error, IndexError, UnicodeDecodeError):
        return None


def is_incomplete_delivery(buffer: bytes) -> bool:
    """Whether the buffer starts with a delivery that has arrived only in part, so that the caller must wait for the
    rest. False if this part already shows that pika must read the delivery."""
    if buffer[7:11] != _DELIVER or buffer[0] != spec.FRAME_METHOD:
        return False
    header_at = 8 + _FRAME.unpack_from(buffer)[2]
    if len(buffer) < header_at + _HEADER.size:
        return True
    kind, _, octets, _, _, body_octets, flags = _HEADER.unpack_from(buffer, header_at)
    if kind != spec.FRAME_HEADER or flags & ~_READ or not body_octets:
        return False
    body_at = header_at + octets + 8
    if len(buffer) < body_at + _FRAME.size:
        return True
    kind, _, octets = _FRAME.unpack_from(buffer, body_at)
    is_whole = len(buffer) >= body_at + octets + 8
    return kind == spec.FRAME_BODY and octets == body_octets and not is_whole


def _table(buffer: bytes, at: int, end: int, flags: int) -> bytes | None:
    """The encoded headers among the properties that start at this offset; None if the message has no headers."""
    if not flags & spec.BasicProperties.FLAG_HEADERS:
        return None
    if flags & spec.BasicProperties.FLAG_CONTENT_TYPE:
        at += 1 + buffer[at]
    table_end = at + 4 + int.from_bytes(buffer[at : at + 4], "big")
    if table_end > end:
        raise IndexError
    return buffer[at:table_end]


def acks(channel_number: int, tags: Iterable[tuple[int, bool]]) -> list[bytes]:
    """The frames that ack deliveries: for each, its tag, and whether the ack includes all earlier deliveries."""
    kind, method = spec.FRAME_METHOD, spec.Basic.Ack.INDEX
    return [
        _ACK.pack(kind, channel_number, _ACK_OCTETS, method, tag, is_for_all_before, _END)
        for tag, is_for_all_before in tags
    ]
