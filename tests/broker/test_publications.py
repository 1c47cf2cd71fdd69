"""Messages written in one step are the octets that pika writes; what we do not write is left to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.publications import publication

MOST = 300


def written_by_pika(channel_number: int, exchange: str, message: Outgoing) -> bytes:
    properties = spec.BasicProperties(
        content_type="application/json",
        delivery_mode=2,
        correlation_id=message.correlation_id,
        message_id=message.message_id,
    )
    method = spec.Basic.Publish(exchange=exchange, routing_key=message.queue, mandatory=True)
    frames = (
        frame.Method(channel_number, method),
        frame.Header(channel_number, len(message.body), properties),
        frame.Body(channel_number, message.body),
    )
    return b"".join(each.marshal() for each in frames)


@given(
    channel_number=st.integers(1, 65_535),
    exchange=st.text(max_size=60),
    queue=st.text(max_size=60),
    body=st.binary(min_size=1, max_size=MOST),
    correlation_id=st.none() | st.text(max_size=60),
)
def test_a_message_is_written_as_pika_writes_it(
    channel_number: int, exchange: str, queue: str, body: bytes, correlation_id: str | None
) -> None:
    message = Outgoing(queue, body, "0198", correlation_id)

    assert publication(channel_number, exchange, message, MOST) == written_by_pika(channel_number, exchange, message)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Outgoing("q", b"x" * (MOST + 1), "0198"), id="longer than a frame"),
        pytest.param(Outgoing("q", b"", "0198"), id="no body"),
        pytest.param(Outgoing("q", b"x", "0198", traceparent="00-0af7"), id="a header"),
    ],
)
def test_another_is_left_to_pika(message: Outgoing) -> None:
    assert publication(1, "x", message, MOST) is None
