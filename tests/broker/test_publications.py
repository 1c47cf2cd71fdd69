"""Our encoder writes a message in one step, with the same bytes as pika."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec

from dispatcher.broker.outgoing import Outgoing

MAX_FRAME_BODY = 300


def written_by_pika(channel_number: int, exchange: str, message: Outgoing) -> bytes:
    properties = spec.BasicProperties(
        content_type="application/json",
        headers={"traceparent": message.traceparent} if message.traceparent else None,
        delivery_mode=2,
        correlation_id=message.correlation_id,
        message_id=message.message_id,
    )
    method = spec.Basic.Publish(exchange=exchange, routing_key=message.queue, mandatory=True)
    frames = (
        frame.Method(channel_number, method),
        frame.Header(channel_number, len(message.body), properties),
        *(
            frame.Body(channel_number, message.body[at : at + MAX_FRAME_BODY])
            for at in range(0, len(message.body), MAX_FRAME_BODY)
        ),
    )
    return b"".join(each.marshal() for each in frames)


@given(
    channel_number=st.integers(1, 65_535),
    exchange=st.text(max_size=60),
    queue=st.text(max_size=60),
    body=st.binary(max_size=3 * MAX_FRAME_BODY),
    correlation_id=st.none() | st.text(max_size=60),
    traceparent=st.none() | st.text(min_size=1, max_size=60),
)
def test_a_message_is_encoded_as_pika_encodes_it(
    channel_number: int,
    exchange: str,
    queue: str,
    body: bytes,
    correlation_id: str | None,
    traceparent: str | None,
) -> None:
    message = Outgoing(queue, body, "0198", correlation_id, traceparent)

    assert message.frames(channel_number, exchange, MAX_FRAME_BODY) == written_by_pika(
        channel_number, exchange, message
    )
