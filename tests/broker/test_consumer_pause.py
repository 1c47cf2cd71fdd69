"""`pause` requeues all messages for other consumers until `resume`. Both work at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.broker.topology import Topology, declare, depths
from dispatcher.domain.retry import Backoff
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Rabbit, eventually


class Worker:
    """A consumer behind a proxy, and a record of the callbacks that it called."""

    def __init__(self, proxy: Proxy, queue: str) -> None:
        self.deliveries: list[Delivery] = []
        self.losses = 0
        self.consumer = Consumer(
            proxy.url,
            {"normal": queue},
            prefetch=100,
            name="pausing",
            backoff=Backoff(base_seconds=0.01, cap_seconds=0.05),
        )
        self.task = asyncio.create_task(self.consumer.run(self.deliveries.append, self._lose))

    async def got(self, count: int) -> list[Delivery]:
        """Wait for exactly this number of deliveries since the last lost connection."""
        await eventually(lambda: len(self.deliveries) >= count, f"{count} deliveries")
        assert len(self.deliveries) == count
        return list(self.deliveries)

    def _lose(self) -> None:
        self.losses += 1
        self.deliveries.clear()


@asynccontextmanager
async def starting(proxy: Proxy, topology: Topology) -> AsyncIterator[Worker]:
    """A worker on the test's send queue, before it starts to connect. Connecting takes a few rounds of the loop."""
    made = Worker(proxy, topology.queue)
    try:
        yield made
    finally:
        await made.consumer.close()
        await asyncio.wait_for(made.task, 10)


@pytest.fixture
async def worker(proxy: Proxy, topology: Topology) -> AsyncIterator[Worker]:
    """A worker on the test's send queue. It connects while later fixtures are set up."""
    async with starting(proxy, topology) as made:
        yield made


async def publish(rabbit: Rabbit, topology: Topology, names: str) -> None:
    for name in names:
        await rabbit.publish(topology.queue, name.encode())


async def left(rabbit: Rabbit, topology: Topology, count: int) -> str:
    """Take this number of messages, as another consumer would; return their bodies in alphabetical order."""
    return "".join(sorted(message.body.decode() for message in await rabbit.take_all(topology.queue, count)))


async def test_pause_returns_deliveries_to_other_consumers(worker: Worker, topology: Topology, rabbit: Rabbit) -> None:
    await publish(rabbit, topology, "abc")
    worker.consumer.ack((await worker.got(3))[:1])

    worker.consumer.pause()
    assert not worker.consumer.is_consuming
    await publish(rabbit, topology, "d")

    assert await left(rabbit, topology, 3) == "bcd"
    assert (worker.losses, worker.consumer.outstanding, worker.deliveries) == (1, 0, [])


async def test_deliveries_from_before_the_pause_are_void(worker: Worker, topology: Topology, rabbit: Rabbit) -> None:
    await publish(rabbit, topology, "ab")
    old = await worker.got(2)
    worker.consumer.pause()
    await eventually(lambda: worker.losses == 1, "the end of the session")

    worker.consumer.ack(old)
    worker.consumer.resume()
    worker.consumer.reject(old[0])

    again = await worker.got(2)
    assert all(each.redelivered for each in again)
    worker.consumer.ack(again)
    await eventually(lambda: worker.consumer.outstanding == 0)
    assert worker.losses == 1


async def test_resume_consumes_again_and_a_second_pause_stops_it(
    worker: Worker, topology: Topology, rabbit: Rabbit
) -> None:
    for losses, name in enumerate("abc", start=1):
        await publish(rabbit, topology, name)
        worker.consumer.ack(await worker.got(1))
        worker.consumer.pause()
        worker.consumer.pause()
        await eventually(lambda losses=losses: worker.losses == losses, "the end of the session")  # type: ignore[misc]
        worker.consumer.resume()
        worker.consumer.resume()

    await eventually(lambda: worker.consumer.is_consuming, "consuming")
    assert await left(rabbit, topology, 0) == ""


async def test_resume_right_after_pause_consumes_again_and_is_not_a_loss(
    worker: Worker, topology: Topology, rabbit: Rabbit, capsys: pytest.CaptureFixture[str]
) -> None:
    await publish(rabbit, topology, "a")
    await worker.got(1)

    worker.consumer.pause()
    worker.consumer.resume()
    await eventually(lambda: worker.losses == 1, "the end of the session")

    (again,) = await worker.got(1)
    worker.consumer.ack([again])
    assert "connection_lost" not in capsys.readouterr().out


async def test_a_pause_during_the_connect_takes_effect(topology: Topology, rabbit: Rabbit, proxy: Proxy) -> None:
    proxy.freeze()
    async with starting(proxy, topology) as worker:
        await publish(rabbit, topology, "a")
        await eventually(lambda: proxy.holds, "the connection")

        worker.consumer.pause()
        proxy.thaw()

        await eventually(lambda: proxy.is_idle, "the end of the connection")
        assert await left(rabbit, topology, 1) == "a"
        assert (worker.losses, worker.deliveries, worker.consumer.is_consuming) == (0, [], False)
        worker.consumer.resume()
        await publish(rabbit, topology, "b")
        await worker.got(1)


@pytest.mark.parametrize("turns", range(0, 60, 5))
async def test_a_pause_at_any_moment_of_the_start_takes_effect(
    topology: Topology, rabbit: Rabbit, proxy: Proxy, turns: int
) -> None:
    async with starting(proxy, topology) as worker:
        for _ in range(turns):
            await asyncio.sleep(0.0005)

        worker.consumer.pause()
        await eventually(lambda: not worker.consumer.is_consuming and proxy.is_idle, "the end of the connection")

        await publish(rabbit, topology, "a")
        assert await left(rabbit, topology, 1) == "a"


async def test_a_pause_during_an_outage_takes_effect_and_ends(
    worker: Worker, topology: Topology, rabbit: Rabbit, proxy: Proxy
) -> None:
    await eventually(lambda: worker.consumer.is_consuming, "consuming")
    proxy.cut()
    worker.consumer.pause()
    await eventually(lambda: worker.losses == 1 and proxy.is_idle, "the loss")
    await publish(rabbit, topology, "a")
    assert await left(rabbit, topology, 1) == "a"

    worker.consumer.resume()
    await publish(rabbit, topology, "b")

    await worker.got(1)


@pytest.mark.parametrize("stop", [Consumer.cancel, Consumer.close])
async def test_a_paused_consumer_can_be_cancelled_and_resume_then_has_no_effect(
    proxy: Proxy, topology: Topology, stop: Callable[[Consumer], Awaitable[None]]
) -> None:
    worker = Worker(proxy, topology.queue)
    await eventually(lambda: worker.consumer.is_consuming, "consuming")
    worker.consumer.pause()
    await eventually(lambda: worker.losses == 1, "the end of the session")

    await stop(worker.consumer)
    worker.consumer.resume()

    await asyncio.wait_for(worker.task, 10)
    assert proxy.connections == 1


async def test_a_pause_after_cancel_still_allows_acks(worker: Worker, topology: Topology, rabbit: Rabbit) -> None:
    await publish(rabbit, topology, "abc")
    at_hand = await worker.got(3)
    await worker.consumer.cancel()

    worker.consumer.pause()
    worker.consumer.ack(at_hand[:2])
    await worker.consumer.close()

    assert await left(rabbit, topology, 1) == "c"
    assert worker.losses == 0


async def test_a_paused_lane_is_not_consumed_until_it_is_resumed_and_the_other_lanes_are(
    amqp_url: str, topology: Topology, rabbit: Rabbit
) -> None:
    deliveries: list[Delivery] = []
    consumer = Consumer(amqp_url, topology.send_queues, prefetch=1, name="lanes")
    task = asyncio.create_task(consumer.run(deliveries.append, deliveries.clear))
    try:
        for lane, queue in topology.send_queues.items():
            await rabbit.publish(queue, lane.encode())
        await eventually(lambda: len(deliveries) == 3, "a delivery of each lane beside the others' full windows")
        assert {each.lane: each.body.decode() for each in deliveries} == {lane: lane for lane in topology.lanes}

        await consumer.pause_lane("bulk")
        consumer.ack(deliveries)
        for queue in topology.send_queues.values():
            await rabbit.publish(queue, b"later")
        await eventually(lambda: len(deliveries) == 5, "the deliveries of the other lanes")
        found = await depths(amqp_url, topology)
        assert found[topology.send_queues["bulk"]] == 1

        await consumer.resume_lane("bulk")
        await eventually(lambda: len(deliveries) == 6, "the delivery of the resumed lane")
        assert deliveries[-1].lane == "bulk"
    finally:
        await consumer.close()
        await asyncio.wait_for(task, 10)


async def test_a_deleted_queue_of_a_lane_stops_only_that_lane_until_the_queue_exists_again(
    amqp_url: str, topology: Topology, rabbit: Rabbit, capsys: pytest.CaptureFixture[str]
) -> None:
    deliveries: list[Delivery] = []
    losses: list[str] = []
    consumer = Consumer(amqp_url, topology.send_queues, prefetch=2, name="lanes")
    task = asyncio.create_task(consumer.run(deliveries.append, lambda: losses.append("lost")))
    queues = topology.send_queues
    try:
        await rabbit.publish(queues["bulk"], b"of the deleted queue")
        await eventually(lambda: deliveries, "the delivery of the lane")

        await rabbit.delete_queue(queues["bulk"])
        await eventually(lambda: "broker.queue_missing" in capsys.readouterr().out, "the report of the missing queue")
        consumer.ack(deliveries)
        for number in range(6):
            await rabbit.publish(queues["urgent"], str(number).encode())
            await eventually(lambda number=number: len(deliveries) == 2 + number, "an urgent delivery")  # type: ignore[misc]
            consumer.ack(deliveries)
        assert (losses, consumer.outstanding) == ([], 0)

        await declare(amqp_url, topology)
        await rabbit.publish(queues["bulk"], b"of the new queue")
        await eventually(lambda: deliveries[-1].body == b"of the new queue", "the delivery of the new queue")
        assert losses == []
    finally:
        await consumer.close()
        await asyncio.wait_for(task, 10)


async def test_a_queue_that_is_missing_at_the_start_stops_only_its_lane(
    amqp_url: str, topology: Topology, rabbit: Rabbit
) -> None:
    await rabbit.delete_queue(topology.queue)
    deliveries: list[Delivery] = []
    consumer = Consumer(amqp_url, topology.send_queues, prefetch=2, name="lanes")
    task = asyncio.create_task(consumer.run(deliveries.append, deliveries.clear))
    try:
        await rabbit.publish(topology.send_queues["bulk"], b"bulk")
        await eventually(lambda: [each.lane for each in deliveries] == ["bulk"], "the delivery of the other lane")
        await declare(amqp_url, topology)
        await rabbit.publish(topology.queue, b"normal")
        await eventually(lambda: len(deliveries) == 2, "the delivery of the declared queue")
    finally:
        await consumer.close()
        await asyncio.wait_for(task, 10)


async def test_a_deleted_queue_is_noticed_and_later_consumed_again_although_rabbitmq_does_not_report_it(
    amqp_url: str, proxy: Proxy, topology: Topology, rabbit: Rabbit, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.change(b"consumer_cancel_notifyt\x01", b"consumer_cancel_notifyt\x00")  # as if the client asked for no report
    deliveries: list[Delivery] = []
    consumer = Consumer(proxy.url, topology.send_queues, prefetch=2, name="lanes", check_seconds=0.1)
    task = asyncio.create_task(consumer.run(deliveries.append, deliveries.clear))
    try:
        await eventually(lambda: consumer.is_consuming, "the consumers")
        await rabbit.delete_queue(topology.queue)
        await eventually(lambda: "broker.queue_missing" in capsys.readouterr().out, "the report")
        await rabbit.publish(topology.send_queues["urgent"], b"of another lane")
        await eventually(lambda: len(deliveries) == 1, "the other lane's delivery")

        await declare(amqp_url, topology)
        await rabbit.publish(topology.queue, b"of the new queue")
        await eventually(lambda: len(deliveries) == 2, "the delivery")
    finally:
        await consumer.close()
        await asyncio.wait_for(task, 10)
