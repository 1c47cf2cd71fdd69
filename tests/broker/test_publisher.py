"""A message counts as published only when RabbitMQ has confirmed it and a queue has it. Our encoder writes a message in
one step, with the same bytes as pika."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import BATCH_SECONDS, Publisher
from dispatcher.broker.topology import Topology, declare, depths
from dispatcher.errors import BrokerUnavailable
from tests.broker.proxy import Proxy
from tests.broker.rabbit import BrokerStage, Rabbit
from tests.waiting import until_answer

DOZENS_OF_CONFIRMS = 2000
"""The size of dozens of confirms, in bytes. RabbitMQ sends confirms one by one if only a few messages are
unconfirmed."""
SOON_SECONDS = 1.5
"""The timeout for batches to which RabbitMQ must not answer in time. All other batches have a longer timeout, for a
busy machine."""
FULL = {"x-max-length": 1, "x-overflow": "reject-publish"}


class Press(BrokerStage):
    """Publishers to the test's exchange, which are closed after the test."""

    def publisher(self, url: str | None = None, **options: Any) -> Publisher:
        exchange = self.topology.exchange
        publisher = Publisher(url or self.amqp_url, exchange, name=exchange, **options)
        self.stack.push_async_callback(publisher.close)
        return publisher

    async def connected(self, url: str | None = None, **options: Any) -> Publisher:
        publisher = self.publisher(url, **options)
        assert await publisher.publish(self.pointers()) == [True]
        return publisher

    def pointers(self, count: int = 1, queue: str | None = None) -> list[Outgoing]:
        keys = [f"order-{number}" for number in range(count)]
        return [Outgoing.of_pointer(queue or self.queue, Pointer(uuid4(), key)) for key in keys]

    async def bind_full_queue(self) -> str:
        """Makes a queue that has room for one message, and refuses more."""
        full = f"{self.queue}.full"
        await self.rabbit.declare_queue(full, **FULL)
        await self.rabbit.bind_queue(full, self.topology.exchange)
        self.stack.push_async_callback(self.rabbit.delete_queue, full)
        return full

    async def depth(self) -> int:
        return (await depths(self.amqp_url, self.topology))[self.queue]


@pytest.fixture
def topology_names(topology_names: Topology) -> Topology:
    """With one lane, because each queue costs RabbitMQ work."""
    return replace(topology_names, lanes=("normal",))


@pytest.fixture
async def press(amqp_url: str, topology: Topology, rabbit: Rabbit) -> AsyncIterator[Press]:
    async with AsyncExitStack() as stack:
        yield Press(amqp_url, topology, rabbit, stack)


async def test_a_published_message_arrives_complete_and_persistent(press: Press) -> None:
    pointer = Pointer(uuid4(), "order-17", "request-9", f"00-{'a' * 32}-{'b' * 16}-01")

    assert await press.publisher().publish([Outgoing.of_pointer(press.queue, pointer)]) == [True]

    (message,) = await press.rabbit.take_all(press.queue, 1)
    assert message.pointer == pointer
    assert message.properties.delivery_mode == 2
    assert message.properties.message_id == str(pointer.email_id)
    assert message.properties.content_type == "application/json"


async def test_each_message_has_its_own_result_also_beside_messages_about_the_same_email(press: Press) -> None:
    queues = press.queue, "no such queue", press.topology.dlq
    pointer = Pointer(uuid4(), "order-17")
    messages = [Outgoing.of_pointer(queue, pointer) for queue in queues]

    flags = await press.publisher().publish(messages * 100)

    assert flags == [True, False, True] * 100
    assert flags.returned == 100
    for queue, message in (queues[0], messages[0]), (queues[2], messages[2]):
        assert {taken.body for taken in await press.rabbit.take_all(queue, 100)} == {message.body}


async def test_a_refused_message_is_not_published_and_a_channel_on_which_a_queue_refuses_everything_is_replaced(
    press: Press, proxy: Proxy
) -> None:
    """After the leader of a quorum queue was killed, RabbitMQ may refuse a message on one channel and accept the
    message on a new channel."""
    full = await press.bind_full_queue()
    publisher = press.publisher(proxy.url)
    assert await publisher.publish(press.pointers(1, full)) == [True]

    async def is_replaced() -> bool:
        refused = await publisher.publish(press.pointers(1, full))
        assert (refused, refused.returned) == ([False], 0)
        # Confirms from other queues must not hide the refusals of this queue.
        assert await publisher.publish([*press.pointers(), *press.pointers(1, full)]) == [True, False]
        return proxy.connections == 2

    await until_answer(is_replaced)


async def test_a_batch_larger_than_the_window_is_published_completely_and_in_order(press: Press) -> None:
    messages = press.pointers(205)

    assert await press.publisher(window=10).publish(messages) == [True] * 205

    assert [each.body for each in await press.rabbit.take_all(press.queue, 205)] == [each.body for each in messages]


async def test_concurrent_tasks_get_their_own_results(press: Press) -> None:
    publisher = press.publisher(window=7)
    batches = [press.pointers(20, None if number % 2 else "no such queue") for number in range(10)]

    answers = await asyncio.gather(*(publisher.publish(batch) for batch in batches))

    assert answers == [[bool(number % 2)] * 20 for number in range(10)]


async def test_a_missing_exchange_is_reported_and_the_publisher_recovers(press: Press) -> None:
    await press.rabbit.delete_exchange(press.topology.exchange)
    publisher = press.publisher()

    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=r"no exchange .* Run `dispatcher init`"):
            await publisher.publish(press.pointers())

    await declare(press.amqp_url, press.topology)
    await press.rabbit.bind_queue(press.queue, press.topology.exchange)
    assert await publisher.publish(press.pointers()) == [True]


async def test_an_unreachable_rabbitmq_raises(press: Press, closed_port: int) -> None:
    with pytest.raises(BrokerUnavailable, match="connection refused"):
        await press.publisher(f"amqp://u:p@127.0.0.1:{closed_port}/").publish(press.pointers())


async def test_a_cut_after_some_confirms_returns_them(press: Press, proxy: Proxy) -> None:
    publisher = await press.connected(proxy.url, window=4)
    proxy.cut_after(DOZENS_OF_CONFIRMS)

    flags = await publisher.publish(press.pointers(1000))

    assert len(flags) == 1000
    assert any(flags)
    assert not all(flags)
    assert 1 + sum(flags) <= await press.depth() <= 1 + sum(flags) + 4


async def test_a_missing_confirm_times_out(press: Press, proxy: Proxy) -> None:
    publisher = await press.connected(proxy.url)
    proxy.freeze()
    publisher.batch_seconds = SOON_SECONDS

    with pytest.raises(BrokerUnavailable, match=r"did not confirm 3 of 3 messages within 1\.5 s"):
        await publisher.publish(press.pointers(3))

    proxy.thaw()
    publisher.batch_seconds = BATCH_SECONDS

    async def is_back() -> bool:  # the publisher notices a lost connection only at its next use
        with suppress(BrokerUnavailable):
            return await publisher.publish(press.pointers()) == [True]
        return False

    await until_answer(is_back)


async def test_an_alarm_is_reported_and_limits_what_is_written(press: Press, proxy: Proxy) -> None:
    publisher = await press.connected(proxy.url, window=10)
    proxy.freeze()
    publisher.batch_seconds = SOON_SECONDS
    publishing = asyncio.create_task(publisher.publish(press.pointers(500)))
    await asyncio.sleep(0)
    proxy.tell_clients(frame.Method(0, spec.Connection.Blocked("low on memory")).marshal())

    with pytest.raises(BrokerUnavailable, match="blocks publishers"):
        await publishing
    others = [publisher.publish(press.pointers(500)) for _ in range(3)]
    faults = await asyncio.gather(*others, publisher.find(press.queue), return_exceptions=True)
    assert ["blocks publishers" in str(each) for each in faults] == [True] * 4
    assert publisher.is_blocked
    assert proxy.connections == 1

    proxy.thaw()
    proxy.tell_clients(frame.Method(0, spec.Connection.Unblocked()).marshal())
    publisher.batch_seconds = BATCH_SECONDS
    assert await publisher.publish(press.pointers()) == [True]
    assert await press.depth() == 1 + 10 + 1


async def test_a_cancelled_publish_does_not_disturb_the_next(press: Press, proxy: Proxy) -> None:
    publisher = await press.connected(proxy.url)
    proxy.freeze()
    publishing = asyncio.create_task(publisher.publish(press.pointers(3, "no such queue")))
    await asyncio.sleep(0)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    proxy.thaw()

    assert await publisher.publish(press.pointers()) == [True]


async def test_close_is_idempotent_and_publish_reconnects(press: Press) -> None:
    publisher = press.publisher()
    for _ in range(2):
        await publisher.close()
        await publisher.close()
        assert await publisher.publish(press.pointers()) == [True]


MAX_FRAME_BODY = 300
_texts, _bodies = st.text(max_size=60), st.binary(max_size=3 * MAX_FRAME_BODY)
_traces = st.none() | st.text(min_size=1, max_size=60)


def written_by_pika(channel_number: int, exchange: str, message: Outgoing) -> bytes:
    properties = spec.BasicProperties(
        content_type="application/json",
        headers={"traceparent": message.traceparent} if message.traceparent else None,
        delivery_mode=2,
        correlation_id=message.correlation_id,
        message_id=message.message_id,
    )
    method = spec.Basic.Publish(exchange=exchange, routing_key=message.queue, mandatory=True)
    parts = [message.body[at : at + MAX_FRAME_BODY] for at in range(0, len(message.body), MAX_FRAME_BODY)]
    frames = (
        frame.Method(channel_number, method),
        frame.Header(channel_number, len(message.body), properties),
        *(frame.Body(channel_number, part) for part in parts),
    )
    return b"".join(each.marshal() for each in frames)


@given(
    channel_number=st.integers(1, 65_535),
    exchange=_texts,
    message=st.builds(Outgoing, _texts, _bodies, st.just("0198"), st.none() | _texts, _traces),
)
def test_a_message_is_encoded_as_pika_encodes_it(channel_number: int, exchange: str, message: Outgoing) -> None:
    expected = written_by_pika(channel_number, exchange, message)

    assert message.frames(channel_number, exchange, MAX_FRAME_BODY) == expected
