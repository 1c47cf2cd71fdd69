"""A message counts as published only when RabbitMQ has confirmed it and a queue has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import pytest
from pika import frame, spec

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import BATCH_SECONDS, Publisher
from dispatcher.broker.topology import Topology, declare, depths
from dispatcher.errors import BrokerUnavailable, ConfigurationError
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Operator, Rabbit, eventually
from tests.waiting import until_answer

MakePublisher = Callable[..., Publisher]
DOZENS_OF_CONFIRMS = 2000
"""The size of dozens of confirms, in bytes. RabbitMQ sends confirms one by one if only a few messages are
unconfirmed."""
SOON_SECONDS = 1.5
"""The timeout for batches to which RabbitMQ must not answer in time. All other batches have a longer timeout, for a
busy machine."""


@pytest.fixture
async def make_publisher(amqp_url: str, topology: Topology) -> AsyncIterator[MakePublisher]:
    """Creates publishers to the test's exchange, and closes them after the test."""
    async with AsyncExitStack() as stack:

        def make(url: str = amqp_url, **options: Any) -> Publisher:
            publisher = Publisher(url, topology.exchange, name=topology.exchange, **options)
            stack.push_async_callback(publisher.close)
            return publisher

        yield make


def pointers(queue: str, count: int = 1) -> list[Outgoing]:
    """`count` messages for a queue."""
    return [Outgoing.of_pointer(queue, Pointer(uuid4(), f"order-{number}")) for number in range(count)]


async def test_a_published_message_arrives_complete_and_persistent(
    make_publisher: MakePublisher, topology: Topology, rabbit: Rabbit
) -> None:
    pointer = Pointer(uuid4(), "order-17", "request-9", f"00-{'a' * 32}-{'b' * 16}-01")

    assert await make_publisher().publish([Outgoing.of_pointer(topology.queue, pointer)]) == [True]

    (message,) = await rabbit.take_all(topology.queue, 1)
    assert message.pointer == pointer
    assert message.properties.delivery_mode == 2
    assert message.properties.message_id == str(pointer.email_id)
    assert message.properties.content_type == "application/json"


async def test_each_message_has_its_own_result(
    make_publisher: MakePublisher, topology: Topology, rabbit: Rabbit
) -> None:
    send, unroutable, dead = pointers(topology.queue)[0], pointers("no such queue")[0], pointers(topology.dlq)[0]

    flags = await make_publisher().publish([send, unroutable, dead, unroutable, send])

    assert flags == [True, False, True, False, True]
    assert flags.returned == 2
    assert [message.body for message in await rabbit.take_all(topology.queue, 2)] == [send.body, send.body]
    assert [message.body for message in await rabbit.take_all(topology.dlq, 1)] == [dead.body]


async def test_the_same_email_may_be_routed_to_one_queue_and_not_to_another(
    make_publisher: MakePublisher, topology: Topology
) -> None:
    pointer = Pointer(uuid4(), "order-17")
    messages = [Outgoing.of_pointer(queue, pointer) for queue in (topology.queue, "no such queue", topology.dlq)]

    assert await make_publisher().publish(messages * 100) == [True, False, True] * 100


async def test_a_refused_message_is_not_published(
    make_publisher: MakePublisher, topology: Topology, rabbit: Rabbit
) -> None:
    full = f"{topology.queue}.full"
    await rabbit.declare_queue(full, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    await rabbit.bind_queue(full, topology.exchange)
    publisher = make_publisher()

    assert await publisher.publish(pointers(full)) == [True]
    refused = await publisher.publish(pointers(full))
    assert (refused, refused.returned) == ([False], 0)
    assert await publisher.publish([*pointers(topology.queue), *pointers(full)]) == [True, False]

    await rabbit.delete_queue(full)


async def test_a_channel_on_which_a_queue_refuses_everything_is_replaced(
    amqp_url: str, make_publisher: MakePublisher, topology: Topology, rabbit: Rabbit
) -> None:
    """After the leader of a quorum queue was killed, RabbitMQ may refuse a message on one channel and accept the
    message on a new channel."""
    full = f"{topology.queue}.full"
    await rabbit.declare_queue(full, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    await rabbit.bind_queue(full, topology.exchange)
    async with Proxy(amqp_url) as proxy:
        publisher = make_publisher(proxy.url)
        assert await publisher.publish(pointers(full)) == [True]

        async def is_replaced() -> bool:
            assert not any(await publisher.publish(pointers(full)))
            # Confirms from other queues must not hide the refusals of this queue.
            assert await publisher.publish(pointers(topology.queue)) == [True]
            return proxy.connections == 2

        await until_answer(is_replaced)

    await rabbit.delete_queue(full)


async def test_a_batch_larger_than_the_window_is_published_completely_and_in_order(
    make_publisher: MakePublisher, topology: Topology, rabbit: Rabbit
) -> None:
    messages = pointers(topology.queue, 205)

    assert await make_publisher(window=10).publish(messages) == [True] * 205

    assert [each.body for each in await rabbit.take_all(topology.queue, 205)] == [each.body for each in messages]


async def test_an_empty_batch_is_published_at_once(make_publisher: MakePublisher) -> None:
    assert await make_publisher().publish([]) == []


async def test_concurrent_tasks_get_their_own_results(make_publisher: MakePublisher, topology: Topology) -> None:
    publisher = make_publisher(window=7)
    batches = [pointers(topology.queue if number % 2 else "no such queue", 20) for number in range(10)]

    answers = await asyncio.gather(*(publisher.publish(batch) for batch in batches))

    assert answers == [[bool(number % 2)] * 20 for number in range(10)]


async def test_a_missing_exchange_is_reported_and_the_publisher_recovers(
    amqp_url: str, undeclared: Topology, make_publisher: MakePublisher, rabbit: Rabbit
) -> None:
    await rabbit.delete_exchange(undeclared.exchange)
    publisher = make_publisher()

    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=r"no exchange .* Run `dispatcher init`"):
            await publisher.publish(pointers(undeclared.queue))

    await declare(amqp_url, undeclared)
    assert await publisher.publish(pointers(undeclared.queue)) == [True]


async def test_the_publisher_survives_a_forced_close(
    make_publisher: MakePublisher, topology: Topology, operator: Operator
) -> None:
    publisher = make_publisher()
    assert await publisher.publish(pointers(topology.queue)) == [True]
    await eventually(lambda: operator.close_connection(topology.exchange), "the connection's listing")

    assert await _published(publisher, pointers(topology.queue)) == [True]


async def test_an_unreachable_rabbitmq_raises(make_publisher: MakePublisher, closed_port: int) -> None:
    with pytest.raises(BrokerUnavailable, match="connection refused"):
        await make_publisher(f"amqp://u:p@127.0.0.1:{closed_port}/").publish(pointers("q"))


async def test_a_cut_before_any_confirm_raises(make_publisher: MakePublisher, topology: Topology, proxy: Proxy) -> None:
    publisher = make_publisher(proxy.url)
    assert await publisher.publish(pointers(topology.queue)) == [True]
    proxy.freeze()
    publishing = asyncio.create_task(publisher.publish(pointers(topology.queue, 3)))
    await asyncio.sleep(0)
    proxy.cut()

    with pytest.raises(BrokerUnavailable, match="was interrupted"):
        await publishing
    proxy.thaw()
    assert await publisher.publish(pointers(topology.queue)) == [True]


async def test_a_cut_after_some_confirms_returns_them(
    make_publisher: MakePublisher, topology: Topology, proxy: Proxy, amqp_url: str
) -> None:
    publisher = make_publisher(proxy.url, window=4)
    assert await publisher.publish(pointers(topology.queue)) == [True]
    proxy.cut_after(DOZENS_OF_CONFIRMS)

    flags = await publisher.publish(pointers(topology.queue, 1000))

    assert len(flags) == 1000
    assert any(flags)
    assert not all(flags)
    assert 1 + sum(flags) <= (await depths(amqp_url, topology))[topology.queue] <= 1 + sum(flags) + 4


async def test_a_missing_confirm_times_out(make_publisher: MakePublisher, topology: Topology, proxy: Proxy) -> None:
    publisher = make_publisher(proxy.url)
    assert await publisher.publish(pointers(topology.queue)) == [True]
    proxy.freeze()
    publisher.batch_seconds = SOON_SECONDS

    with pytest.raises(BrokerUnavailable, match=r"did not confirm 3 of 3 messages within 1\.5 s"):
        await publisher.publish(pointers(topology.queue, 3))

    proxy.thaw()
    publisher.batch_seconds = BATCH_SECONDS
    assert await _published(publisher, pointers(topology.queue)) == [True]


@pytest.mark.parametrize(("count", "written"), [(4, 4), (500, 10)])
async def test_an_alarm_is_reported_and_limits_what_is_written(
    make_publisher: MakePublisher, topology: Topology, proxy: Proxy, amqp_url: str, count: int, written: int
) -> None:
    publisher = make_publisher(proxy.url, window=10)
    assert await publisher.publish(pointers(topology.queue)) == [True]
    proxy.freeze()
    publisher.batch_seconds = SOON_SECONDS
    publishing = asyncio.create_task(publisher.publish(pointers(topology.queue, count)))
    await asyncio.sleep(0)
    proxy.tell_clients(frame.Method(0, spec.Connection.Blocked("low on memory")).marshal())

    with pytest.raises(BrokerUnavailable, match="blocks publishers"):
        await publishing
    others = [publisher.publish(pointers(topology.queue, 500)) for _ in range(3)]
    faults = await asyncio.gather(*others, return_exceptions=True)
    assert ["blocks publishers" in str(each) for each in faults] == [True] * 3
    with pytest.raises(BrokerUnavailable, match="blocks publishers"):
        await publisher.find(topology.queue)
    assert publisher.is_blocked
    assert proxy.connections == 1

    proxy.thaw()
    proxy.tell_clients(frame.Method(0, spec.Connection.Unblocked()).marshal())
    publisher.batch_seconds = BATCH_SECONDS
    assert await publisher.publish(pointers(topology.queue)) == [True]
    assert (await depths(amqp_url, topology))[topology.queue] == 1 + written + 1


async def test_a_cancelled_publish_does_not_disturb_the_next(
    make_publisher: MakePublisher, topology: Topology, proxy: Proxy
) -> None:
    publisher = make_publisher(proxy.url)
    assert await publisher.publish(pointers(topology.queue)) == [True]
    proxy.freeze()
    publishing = asyncio.create_task(publisher.publish(pointers("no such queue", 3)))
    await asyncio.sleep(0)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    proxy.thaw()

    assert await publisher.publish(pointers(topology.queue)) == [True]


async def test_close_is_idempotent_and_publish_reconnects(make_publisher: MakePublisher, topology: Topology) -> None:
    publisher = make_publisher()
    await publisher.close()
    assert await publisher.publish(pointers(topology.queue)) == [True]
    await publisher.close()
    await publisher.close()
    assert await publisher.publish(pointers(topology.queue)) == [True]


def test_an_invalid_url_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError):
        Publisher("amqp://u:p@h:port/", "x", name="test")


async def _published(publisher: Publisher, messages: list[Outgoing]) -> list[bool]:
    """Publish until RabbitMQ confirms, because the publisher notices a lost connection only at its next use."""
    for _ in range(100):
        try:
            return await publisher.publish(messages)
        except BrokerUnavailable:
            pass
    raise AssertionError("RabbitMQ did not come back")
