"""Our reader reads a delivery in one step, with the same result as pika. pika reads all other frames."""

from __future__ import annotations

import struct
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import frame, spec

from dispatcher.broker.deliveries import UNREADABLE, DeliveryFrame, acks, delivery_at, is_incomplete_delivery

BODY = b'{"v":1}'
OURS = {"content_type": "application/json", "delivery_mode": 2, "message_id": "0198", "correlation_id": "c"}


def delivered(properties: dict[str, Any], *, body: bytes = BODY, tag: int = 7, consumer_tag: str = "worker") -> bytes:
    method = spec.Basic.Deliver(consumer_tag, tag, redelivered=True, exchange="x", routing_key="x.send")
    header = frame.Header(3, len(body), spec.BasicProperties(**properties))
    return bytes(frame.Method(3, method).marshal() + header.marshal() + frame.Body(3, body).marshal())


_texts = st.none() | st.text(max_size=60)
_properties = st.fixed_dictionaries({
    "correlation_id": _texts, "content_type": st.none() | st.just("application/json"),
    "delivery_mode": st.none() | st.just(2), "message_id": st.just("0198"),
})  # fmt: skip


@settings(max_examples=50)
@given(st.binary(max_size=20), st.binary(min_size=1, max_size=300), st.integers(1, 2**63), _properties)
def test_a_delivery_of_our_publisher_is_read(before: bytes, body: bytes, tag: int, properties: dict[str, Any]) -> None:
    buffer = before + delivered(properties, body=body, tag=tag) + b"more"

    read = delivery_at(buffer, len(before))

    assert read == DeliveryFrame(len(buffer) - 4, 3, "worker", tag, True, body)


@pytest.mark.parametrize("others", [{}, OURS, {**OURS, "content_type": None}])
@pytest.mark.parametrize("headers", [{}, {"x-delivery-count": 3}, {"traceparent": "00-1", "x-death": [{"count": 1}]}])
def test_headers_are_decoded_on_demand(headers: dict[str, Any], others: dict[str, Any]) -> None:
    read = delivery_at(delivered({**others, "headers": headers}) + b"more", 0)

    assert read is not None
    assert (read.headers, read.body) == (headers, BODY)


def test_headers_that_pika_cannot_parse_are_none() -> None:
    octets = delivered({**OURS, "headers": {"at": datetime(2026, 1, 1, tzinfo=UTC)}})
    far_away = octets.replace(struct.pack(">cQ", b"T", 1767225600), struct.pack(">cQ", b"T", 1767225600000))

    read = delivery_at(far_away, 0)

    assert far_away != octets
    assert read is not None
    assert (read.headers, read.body) == (None, BODY)


@pytest.mark.parametrize(
    "properties",
    [
        {"timestamp": 1}, {"priority": 1}, {"reply_to": "x"}, {"expiration": "1"}, {"type": "x"}, {"user_id": "x"},
        {"app_id": "x"}, {"content_encoding": "gzip"}, {"cluster_id": "x"}, {"headers": {"a": 1}, "priority": 1},
    ],
)  # fmt: skip
def test_deliveries_with_other_properties_are_left_to_pika(properties: dict[str, Any]) -> None:
    assert delivery_at(delivered({**OURS, **properties}), 0) is None


@pytest.mark.parametrize("headers", [None, {"x-delivery-count": 3}])
def test_an_incomplete_delivery_is_recognized_and_not_read(headers: dict[str, Any] | None) -> None:
    whole = delivered({**OURS, "headers": headers})

    known_at = 11  # the first 11 bytes show that the frame is a delivery
    for octets in range(len(whole)):
        assert is_incomplete_delivery(whole[:octets]) is (octets >= known_at)
        assert delivery_at(whole[:octets], 0) is None
    assert not is_incomplete_delivery(whole)
    assert not is_incomplete_delivery(whole + b"more")
    assert delivery_at(whole, 0) is not None


def test_split_and_empty_bodies_are_left_to_pika_and_not_waited_for() -> None:
    method = frame.Method(3, spec.Basic.Deliver("worker", 7, False, "x", "x")).marshal()
    in_pieces = method + frame.Header(3, 10, spec.BasicProperties()).marshal() + frame.Body(3, b"12345").marshal()
    empty = method + frame.Header(3, 0, spec.BasicProperties()).marshal()

    assert not any(is_incomplete_delivery(octets) for octets in (in_pieces[:-1], in_pieces, empty))
    assert delivery_at(empty + method, 0) is None
    assert delivery_at(in_pieces + frame.Body(3, b"12345").marshal(), 0) is None


@pytest.mark.parametrize("headers", [None, {"x-delivery-count": 3}])
def test_a_changed_byte_is_read_as_pika_reads_it_or_left_to_pika(headers: dict[str, Any] | None) -> None:
    whole = delivered({**OURS, "headers": headers})
    for at in range(len(whole)):
        octets = bytearray(whole)
        octets[at] ^= 0xFF
        assert_read_as_pika_does(bytes(octets))


def assert_read_as_pika_does(octets: bytes) -> None:
    read = delivery_at(octets, 0)
    if read is not None:
        values, rest = [], octets
        with suppress(*UNREADABLE):  # pika fails if an exchange name has no end
            while rest:
                consumed, value = frame.decode_frame(rest)
                values.append(value)
                rest = rest[consumed:]
        if len(values) < 3:
            return
        method, header, body = values
        assert isinstance(method, frame.Method)
        assert (read.delivery_tag, read.consumer_tag) == (method.method.delivery_tag, method.method.consumer_tag)
        assert isinstance(header, frame.Header)
        assert isinstance(body, frame.Body)
        assert read.body == body.fragment
        assert read.headers == header.properties.headers


def test_acks_equal_those_that_pika_writes() -> None:
    tags = [(5, True), (2**40, False)]

    assert acks(3, tags) == [frame.Method(3, spec.Basic.Ack(*each)).marshal() for each in tags]
