"""The consumer reconnects after every loss. Exactly the unacked messages are redelivered, and poison messages move to
the DLQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import pytest
from pika import frame, spec

from dispatcher.broker.consumer import CANCELLED_SECONDS, Consumer, Delivery
from dispatcher.broker.pointer import Pointer, decode, encode
from dispatcher.broker.topology import Topology, declare, depths
from dispatcher.domain.retry import Backoff
from dispatcher.errors import ConfigurationError, InvalidPointer
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Operator, Rabbit, eventually
from tests.waiting import until_answer


class Worker:
    """A consumer, and a record of the callbacks that it called."""

    def __init__(self, amqp_url: str, queue: str, *, prefetch: int = 100, name: str = "worker") -> None:
        self.deliveries: list[Delivery] = []
        self.losses = 0
        self.tries: list[str] = []
        self.consumer = Consumer(
            amqp_url,
            {"normal": queue},
            prefetch=prefetch,
            on_attempt=lambda: self.tries.append("tried"),
            on_refused=lambda _: self.tries.append("refused"),
            name=name,
            backoff=Backoff(base_seconds=0.01, cap_seconds=0.05),
        )
        self.task = asyncio.create_task(self.consumer.run(self.deliveries.append, self._lose))

    async def got(self, count: int) -> list[Delivery]:
        """Wait for exactly this number of deliveries since the last lost connection."""
        await eventually(lambda: len(self.deliveries) >= count, f"{count} deliveries")
        assert len(self.deliveries) == count
        return self.deliveries

    async def stop(self) -> None:
        await self.consumer.close()
        await asyncio.wait_for(self.task, 10)

    def _lose(self) -> None:
        self.losses += 1
        self.deliveries.clear()


MakeWorker = Callable[..., Worker]


@pytest.fixture
async def make_worker(amqp_url: str, topology: Topology) -> AsyncIterator[MakeWorker]:
    """Starts consumers of the test's send queue, and stops them after the test."""
    async with AsyncExitStack() as stack:

        def make(url: str = amqp_url, **options: Any) -> Worker:
            worker = Worker(url, topology.queue, **options)
            stack.push_async_callback(worker.stop)
            return worker

        yield make


async def publish(rabbit: Rabbit, topology: Topology, *bodies: str) -> None:
    for body in bodies:
        await rabbit.publish(topology.queue, body.encode())


def bodies(deliveries: list[Delivery]) -> list[str]:
    return [each.body.decode() for each in deliveries]


async def left_after(worker: Worker, rabbit: Rabbit, queue: str, count: int) -> list[str]:
    """End the worker; return the messages that RabbitMQ still has."""
    await worker.stop()
    return sorted(message.body.decode() for message in await rabbit.take_all(queue, count))


async def test_acked_messages_are_not_redelivered(make_worker: MakeWorker, topology: Topology, rabbit: Rabbit) -> None:
    await publish(rabbit, topology, *"abcdef")
    worker = make_worker()

    worker.consumer.ack(await worker.got(6))

    assert worker.consumer.outstanding == 0
    assert await left_after(worker, rabbit, topology.queue, 0) == []


@pytest.mark.parametrize(
    ("batches", "left"),
    [
        (["abc"], "defgh"),
        (["bcd"], "aefgh"),
        (["ab", "d", "c"], "efgh"),
        (["cb", "fe"], "adgh"),
        (["bdfh", "ace"], "g"),
        (["hgfedcb"], "a"),
        (["b", "a"], "cdefgh"),
        (["aceg", "aceg", "abce"], "dfh"),
        ([""], "abcdefgh"),
    ],
    ids=str,
)
async def test_exactly_the_unacked_messages_are_redelivered(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit, batches: list[str], left: str
) -> None:
    await publish(rabbit, topology, *"abcdefgh")
    worker = make_worker()
    by_body = {each.body.decode(): each for each in await worker.got(8)}

    for batch in batches:
        worker.consumer.ack([by_body[body] for body in batch])

    assert worker.consumer.outstanding == len(left)
    assert await left_after(worker, rabbit, topology.queue, len(left)) == sorted(left)


async def test_a_poison_message_moves_to_the_dlq_and_others_are_not_affected(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit
) -> None:
    good = [encode(Pointer(uuid4(), f"order-{number}")) for number in range(3)]
    garbage = [b"\xff\x00", b"{}", b"x" * 100_000]
    for pair in zip(good, garbage, strict=True):
        for body in pair:
            await rabbit.publish(topology.queue, body)
    worker = make_worker()

    for delivery in list(await worker.got(6)):
        try:
            decode(delivery.body)
        except InvalidPointer:
            worker.consumer.reject(delivery)
        else:
            worker.consumer.ack([delivery])

    dead = await rabbit.take_all(topology.dlq, 3)
    assert [message.body for message in dead] == garbage
    (death,) = dead[0].properties.headers["x-death"]
    assert (death["queue"], death["reason"], death["exchange"]) == (topology.queue, "rejected", "")
    assert await left_after(worker, rabbit, topology.queue, 0) == []


async def test_a_requeued_message_is_redelivered(make_worker: MakeWorker, topology: Topology, rabbit: Rabbit) -> None:
    await publish(rabbit, topology, "a", "b")
    worker = make_worker()
    first, second = await worker.got(2)

    worker.consumer.requeue(first)
    again = (await worker.got(3))[2]

    assert (again.body, again.redelivered) == (b"a", True)
    worker.consumer.ack([again, second])
    assert await left_after(worker, rabbit, topology.queue, 0) == []


async def test_prefetch_limits_the_unacked_deliveries(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit
) -> None:
    await publish(rabbit, topology, *"abcdef")
    worker = make_worker(prefetch=2)

    for number in (2, 4, 6):
        worker.consumer.ack((await worker.got(number))[-2:])


async def test_settling_a_delivery_twice_has_no_effect(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit
) -> None:
    await publish(rabbit, topology, "a", "b", "c")
    worker = make_worker()
    first, second, third = await worker.got(3)

    worker.consumer.ack([first, first])
    worker.consumer.ack([first])
    worker.consumer.reject(first)
    worker.consumer.requeue(first)
    worker.consumer.reject(second)
    worker.consumer.ack([second, Delivery(99, third.generation, b"", redelivered=False)])

    assert await left_after(worker, rabbit, topology.queue, 1) == ["c"]
    assert worker.losses == 0


@pytest.mark.parametrize(
    ("batches", "left"),
    [
        (["012"], "b"),
        (["0", "1"], "ab"),
        (["0", "0", "001"], "ab"),
        (["2", "0", "1"], "b"),
        (["b", "012"], ""),
        (["01", "b", "2"], ""),
        (["b", "01"], "a"),
    ],
    ids=str,
)
async def test_a_bundle_is_acked_once_all_of_its_parts_are(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit, batches: list[str], left: str
) -> None:
    await publish(rabbit, topology, "a", "b")
    worker = make_worker()
    first, second = await worker.got(2)
    parts = {str(part.part): part for part in worker.consumer.split(first, 3)} | {"b": second}

    for batch in batches:
        worker.consumer.ack([parts[name] for name in batch])

    assert worker.consumer.outstanding == len(left)
    assert await left_after(worker, rabbit, topology.queue, len(left)) == list(left)
    assert worker.losses == 0


async def test_a_bundle_with_a_rejected_part_moves_to_the_dlq_once_the_others_are_settled(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit
) -> None:
    await publish(rabbit, topology, "a", "b")
    worker = make_worker()
    first, second = await worker.got(2)
    parts = worker.consumer.split(first, 3)

    worker.consumer.reject(parts[1])
    worker.consumer.reject(parts[1])
    worker.consumer.ack([parts[0], parts[1], second])
    assert worker.consumer.outstanding == 1
    worker.consumer.ack([parts[2]])

    (dead,) = await rabbit.take_all(topology.dlq, 1)
    assert dead.body == b"a"
    assert await left_after(worker, rabbit, topology.queue, 0) == []
    assert worker.losses == 0


async def test_a_bundle_with_a_requeued_part_is_redelivered_even_if_another_was_rejected(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit
) -> None:
    await publish(rabbit, topology, "a")
    worker = make_worker()
    (delivery,) = await worker.got(1)
    parts = worker.consumer.split(delivery, 3)

    worker.consumer.requeue(parts[0])
    worker.consumer.reject(parts[2])
    assert worker.consumer.outstanding == 1
    worker.consumer.ack([parts[1]])
    again = (await worker.got(2))[1]

    assert (again.body, again.redelivered) == (b"a", True)
    worker.consumer.ack([again])
    assert await left_after(worker, rabbit, topology.queue, 0) == []


async def test_parts_of_a_lost_channel_are_void(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit, operator: Operator
) -> None:
    await publish(rabbit, topology, "a")
    worker = make_worker(name=topology.queue)
    (delivery,) = await worker.got(1)
    old = worker.consumer.split(delivery, 2)
    worker.consumer.requeue(old[0])

    await eventually(lambda: operator.close_connection(topology.queue), "the connection's listing")
    await eventually(lambda: worker.losses == 1, "the loss")
    (again,) = await worker.got(1)
    new = worker.consumer.split(again, 2)
    worker.consumer.ack([*old, new[0]])

    assert worker.consumer.outstanding == 1
    worker.consumer.ack(new)
    assert await left_after(worker, rabbit, topology.queue, 0) == []
    assert worker.losses == 1


async def test_the_consumer_survives_a_forced_close_and_old_deliveries_are_void(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit, operator: Operator
) -> None:
    await publish(rabbit, topology, "a", "b", "c")
    worker = make_worker(name=topology.queue)
    old = list(await worker.got(3))
    worker.consumer.ack(old[:1])
    await asyncio.sleep(0)  # pika writes at the end of the loop's round

    await eventually(lambda: operator.close_connection(topology.queue), "the connection's listing")
    await eventually(lambda: worker.losses == 1, "the loss")
    again = list(await worker.got(2))
    worker.consumer.ack(old)
    worker.consumer.reject(old[1])

    assert [(each.body, each.redelivered) for each in again] == [(b"b", True), (b"c", True)]
    assert worker.consumer.outstanding == 2
    worker.consumer.ack(again)
    assert await left_after(worker, rabbit, topology.queue, 0) == []
    assert worker.losses == 1


async def test_the_consumer_waits_for_a_missing_queue(
    amqp_url: str, undeclared: Topology, rabbit: Rabbit, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Worker(amqp_url, undeclared.queue)
    printed: list[str] = []

    def says_what_to_do() -> bool:
        printed.append(capsys.readouterr().out)
        return "Run `dispatcher init`" in "".join(printed)

    await eventually(says_what_to_do, "the log line")
    await declare(amqp_url, undeclared)
    await publish(rabbit, undeclared, "a")

    assert bodies(await worker.got(1)) == ["a"]
    assert worker.losses == 0
    await worker.stop()


async def test_a_queue_is_not_consumed_in_the_moment_of_its_deletion(
    make_worker: MakeWorker, amqp_url: str, topology: Topology, rabbit: Rabbit, proxy: Proxy
) -> None:
    await publish(rabbit, topology, "before")
    worker = make_worker(proxy.url)
    worker.consumer.ack(await worker.got(1))  # RabbitMQ may keep a queue whose consumer starts during the deletion
    await left_nothing(rabbit, topology)
    proxy.freeze()  # so that a consumer that looks for the queue at once finds the queue
    await rabbit.delete_queue(topology.queue)
    await eventually(lambda: not worker.consumer.is_consuming, "the cancellation")
    cancelled_at = time.monotonic()
    await declare(amqp_url, topology)
    await publish(rabbit, topology, "a")
    proxy.thaw()

    assert bodies(await worker.got(2)) == ["before", "a"]
    assert time.monotonic() - cancelled_at >= CANCELLED_SECONDS / 2
    assert worker.losses == 0


async def test_the_consumer_survives_a_channel_closed_by_rabbitmq(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit, proxy: Proxy
) -> None:
    await publish(rabbit, topology, "a")
    worker = make_worker(proxy.url)
    await worker.got(1)

    timed_out = spec.Channel.Close(406, "PRECONDITION_FAILED - delivery acknowledgement timed out", 0, 0)
    proxy.tell_clients(frame.Method(1, timed_out).marshal())

    await eventually(lambda: worker.losses == 1, "the loss")
    assert bodies(await worker.got(1)) == ["a"]


async def test_the_consumer_survives_repeated_outages(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit, proxy: Proxy
) -> None:
    worker = make_worker(proxy.url)
    for number in range(5):
        await eventually(lambda: worker.consumer.is_consuming, "consuming")
        await publish(rabbit, topology, str(number))
        (delivery,) = await worker.got(1)
        worker.consumer.ack([delivery])
        await left_nothing(rabbit, topology)
        proxy.cut()
        await eventually(lambda number=number: worker.losses == number + 1, "the loss")  # type: ignore[misc]


async def left_nothing(rabbit: Rabbit, topology: Topology) -> None:
    assert await rabbit.take(topology.queue) is None


async def test_cancel_stops_deliveries_and_still_allows_acks(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit
) -> None:
    await publish(rabbit, topology, *"abcdef")
    worker = make_worker(prefetch=4)
    at_hand = list(await worker.got(4))

    await worker.consumer.cancel()
    await worker.consumer.cancel()
    worker.consumer.ack(at_hand[:2])
    await publish(rabbit, topology, "g")

    assert not worker.consumer.is_consuming
    assert not worker.task.done()
    assert await left_after(worker, rabbit, topology.queue, 5) == ["c", "d", "e", "f", "g"]
    assert bodies(worker.deliveries) == ["a", "b", "c", "d"]
    assert worker.losses == 0


async def test_cancel_during_a_flood_loses_no_message(
    make_worker: MakeWorker, amqp_url: str, topology: Topology, rabbit: Rabbit
) -> None:
    names = [f"{number:04}" for number in range(300)]
    await publish(rabbit, topology, *names)
    worker = make_worker(prefetch=300)
    await eventually(lambda: worker.deliveries)

    await worker.consumer.cancel()
    seen = bodies(worker.deliveries)
    worker.consumer.ack(worker.deliveries)

    async def others_are_back() -> bool:
        return (await depths(amqp_url, topology))[topology.queue] == 300 - len(seen)

    # A quorum queue gets at most 32 commands immediately; RabbitMQ defers the rest. So RabbitMQ handles the acks only
    # after it has requeued the other messages.
    await until_answer(others_are_back)
    assert await left_after(worker, rabbit, topology.queue, 300 - len(seen)) == sorted(set(names) - set(seen))
    assert bodies(worker.deliveries) == seen


async def test_a_loss_after_cancel_calls_on_lost_and_ends_the_run(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit, proxy: Proxy
) -> None:
    await publish(rabbit, topology, "a")
    worker = make_worker(proxy.url)
    (delivery,) = await worker.got(1)
    await worker.consumer.cancel()

    proxy.cut()
    await asyncio.wait_for(worker.task, 10)

    assert worker.losses == 1
    worker.consumer.ack([delivery])
    assert proxy.connections == 1
    assert await left_after(worker, rabbit, topology.queue, 1) == ["a"]


async def test_cancel_and_close_before_the_first_delivery_end_the_run(closed_port: int) -> None:
    for stop in (Consumer.cancel, Consumer.close):
        consumer = Consumer(
            f"amqp://u:p@127.0.0.1:{closed_port}/",
            {"normal": "q"},
            prefetch=1,
            name="test",
            backoff=Backoff(base_seconds=3600, cap_seconds=3600),
        )
        task = asyncio.create_task(consumer.run(lambda _: None, lambda: None))
        await asyncio.sleep(0)
        await stop(consumer)
        await asyncio.wait_for(task, 10)


async def test_cancelling_the_task_returns_the_messages(
    make_worker: MakeWorker, topology: Topology, rabbit: Rabbit
) -> None:
    await publish(rabbit, topology, "a")
    worker = make_worker()
    (delivery,) = await worker.got(1)

    worker.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker.task

    worker.consumer.ack([delivery])
    assert [message.body for message in await rabbit.take_all(topology.queue, 1)] == [b"a"]
    worker.task = asyncio.create_task(asyncio.sleep(0))


def test_an_invalid_url_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError):
        Consumer("amqp://u:p@h:port/", {"normal": "q"}, prefetch=1, name="test")


async def test_a_refused_login_calls_on_refused_and_is_retried(make_worker: MakeWorker, amqp_url: str) -> None:
    parts = urlsplit(amqp_url)
    refused = make_worker(urlunsplit(parts._replace(netloc=f"nobody:word@{parts.hostname}:{parts.port}")))
    served = make_worker()

    await eventually(lambda: len(refused.tries) >= 2 and served.tries, "tries")

    assert set(refused.tries) == {"refused"}
    assert served.tries == ["tried"]


async def test_an_unreachable_rabbitmq_calls_on_tried(make_worker: MakeWorker, closed_port: int) -> None:
    worker = make_worker(f"amqp://u:p@127.0.0.1:{closed_port}/")

    await eventually(lambda: worker.tries, "a try")

    assert set(worker.tries) == {"tried"}
