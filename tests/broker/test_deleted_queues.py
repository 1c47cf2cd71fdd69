"""Send queues are deleted while workers consume them. No deleted queue stays listed, and each new queue is consumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.pointer import Pointer
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import QueueWatch, Topology, declare
from tests.broker.rabbit import Rabbit
from tests.waiting import until, until_answer

LANES = 20
WORKERS = 2


@pytest.fixture
async def many(amqp_url: str, topology_names: Topology, rabbit: Rabbit) -> AsyncIterator[Topology]:
    """A topology with many lanes, declared; deleted afterwards."""
    topology = replace(topology_names, lanes=("normal", *(f"lane{number}" for number in range(1, LANES))))
    await declare(amqp_url, topology)
    yield topology
    for queue in topology.queues:
        await rabbit.delete_queue(queue)
    await rabbit.delete_exchange(topology.exchange)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
async def test_a_deleted_queue_is_missing_until_it_is_declared_and_is_then_consumed(
    amqp_url: str, many: Topology, rabbit: Rabbit, rounds: int
) -> None:
    """RabbitMQ 4.0 keeps a queue, without its binding, if a consumer starts while the queue is being deleted."""
    deliveries: list[Delivery] = []
    queues = many.send_queues
    async with AsyncExitStack() as stack:
        with capture_logs() as logs:
            # Each consumer has one lane, so that it looks for the deleted queue as early as it can.
            for lane in many.lanes * WORKERS:
                consumer = Consumer(amqp_url, {lane: queues[lane]}, prefetch=10, name="worker")
                task = asyncio.create_task(consumer.run(deliveries.append, lambda: None))
                stack.push_async_callback(asyncio.gather, task)
                stack.push_async_callback(consumer.close)
            watch = QueueWatch(amqp_url, many, name="test")
            stack.push_async_callback(watch.close)
            publisher = Publisher(amqp_url, many.exchange, name="test")
            stack.push_async_callback(publisher.close)

            async def are_consumed() -> bool:
                found = await watch.look()
                return all(found[queue].consumers == WORKERS for queue in queues.values())

            def missing() -> int:
                return sum(log["event"] == "broker.queue_missing" for log in logs)

            for number in range(1, rounds + 1):
                await until_answer(are_consumed)
                await asyncio.gather(*map(rabbit.delete_queue, queues.values()))
                await until(lambda number=number: missing() == number * WORKERS * LANES)  # type: ignore[misc]
                await declare(amqp_url, many)
            await until_answer(are_consumed)

            messages = [Outgoing.of_pointer(queue, Pointer(uuid4(), "order-17")) for queue in queues.values()]
            assert await publisher.publish(messages) == [True] * LANES
            await until(lambda: {each.lane for each in deliveries} == set(many.lanes))
