"""The consumer reconnects after every loss. Exactly the unacked messages are redelivered, and poison messages move to
the DLQ. `pause` requeues all messages for other consumers until `resume`. Both work at any moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import pytest
from pika import frame, spec
from structlog.testing import capture_logs

from dispatcher.broker.consumer import CANCELLED_SECONDS, LOOK_SECONDS, Consumer, Delivery
from dispatcher.broker.topology import Topology, declare, depths
from dispatcher.domain.retry import Backoff
from tests.broker.declarer import Declarer
from tests.broker.proxy import Proxy
from tests.broker.rabbit import BrokerStage, Rabbit
from tests.waiting import until, until_answer


class Worker:
    """A consumer, and a record of the callbacks that it called."""

    def __init__(self, amqp_url: str, queues: Mapping[str, str], **options: Any) -> None:
        self.deliveries: list[Delivery] = []
        self.losses = 0
        self.tries: list[str] = []
        given = {"prefetch": 100, "name": "worker", "backoff": Backoff(base_seconds=0.01, cap_seconds=0.05), **options}
        note = self.tries.append
        told: dict[str, Any] = {"on_attempt": lambda: note("tried"), "on_refused": lambda _: note("refused")}
        self.consumer = Consumer(amqp_url, dict(queues), **told, **given)
        self.ack = self.consumer.ack
        self.task = asyncio.create_task(self.consumer.run(self.deliveries.append, self._lose))

    async def got(self, count: int) -> list[Delivery]:
        """Wait for exactly this number of deliveries since the last lost connection."""
        await until(lambda: len(self.deliveries) >= count)
        assert len(self.deliveries) == count
        return list(self.deliveries)

    async def lost(self, times: int) -> None:
        await until(lambda: self.losses == times)

    async def consuming(self) -> None:
        await until(lambda: self.consumer.is_consuming)

    async def stop(self) -> None:
        await self.consumer.close()
        await asyncio.wait_for(self.task, 10)

    def _lose(self) -> None:
        self.losses += 1
        self.deliveries.clear()


class Stage(BrokerStage):
    """Workers that consume the normal queue, and stop after the test."""

    async def publish(self, *bodies: str, lane: str = "normal") -> None:
        for body in bodies:
            await self.rabbit.publish(self.topology.send_queues[lane], body.encode())

    def start(self, url: str | None = None, *, all_lanes: bool = False, **options: Any) -> Worker:
        """Start a worker. It connects while the test goes on."""
        queues = self.topology.send_queues if all_lanes else {"normal": self.queue}
        worker = Worker(url or self.amqp_url, queues, **options)
        self.stack.push_async_callback(worker.stop)
        return worker

    async def has(self, *bodies: str) -> None:
        """Take exactly these messages, as another consumer would."""
        taken = await self.rabbit.take_all(self.queue, len(bodies))
        assert sorted(message.body.decode() for message in taken) == sorted(bodies)

    async def has_after(self, worker: Worker, *bodies: str) -> None:
        await worker.stop()
        await self.has(*bodies)


@asynccontextmanager
async def staged(amqp_url: str, topology: Topology, rabbit: Rabbit) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(amqp_url, topology, rabbit, stack)


@pytest.fixture
async def own_stage(amqp_url: str, topology: Topology, rabbit: Rabbit) -> AsyncIterator[Stage]:
    async with staged(amqp_url, topology, rabbit) as made:
        yield made


@pytest.fixture(scope="module")
def kept_topology(declarer: Declarer) -> Iterator[Topology]:
    """Queues for tests that leave them as they were: the worker acks all messages, or the test takes them."""
    name = f"test.{uuid4().hex}"
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")
    declarer.declare(topology)
    yield topology
    declarer.delete(topology)


@pytest.fixture
async def stage(amqp_url: str, kept_topology: Topology, rabbit: Rabbit) -> AsyncIterator[Stage]:
    async with staged(amqp_url, kept_topology, rabbit) as made:
        yield made
    while await rabbit.take(kept_topology.queue):
        pass  # a message that a failed test has left


def bodies(deliveries: list[Delivery]) -> list[str]:
    return [each.body.decode() for each in deliveries]


@pytest.mark.parametrize(
    ("acts", "left", "dead"),
    [
        # Of messages a to h: which are acked (+), rejected (-) and requeued (~), all names of a word in one call.
        ("+abcdefgh", "", ""),
        ("+abc", "defgh", ""),
        ("+bcd", "aefgh", ""),
        ("+ab +d +c", "efgh", ""),
        ("+cb +fe", "adgh", ""),
        ("+bdfh +ace", "g", ""),
        ("+hgfedcb", "a", ""),
        ("+b +a", "cdefgh", ""),
        ("+aceg +aceg +abce", "dfh", ""),
        ("+", "abcdefgh", ""),
        ("-c +bad", "efgh", "c"),
        ("~c +bad", "cefgh", ""),
        ("+aa +a -a ~a -b +b ~b", "cdefgh", "b"),  # only the first settlement of a message has an effect
        # Of the parts 0 to 2 of message a: it is settled once all of them are.
        ("+012", "bcdefgh", ""),
        ("+0 +1", "abcdefgh", ""),
        ("+0 +0 +001", "abcdefgh", ""),
        ("+2 +0 +1", "bcdefgh", ""),
        ("+b +012", "cdefgh", ""),
        ("+01 +b +2", "cdefgh", ""),
        ("+b +01", "acdefgh", ""),
        ("-1 -1 +01b", "acdefgh", ""),
        ("-1 -1 +01b +2", "cdefgh", "a"),
        ("~0 -2", "abcdefgh", ""),
        ("~0 -2 +1", "abcdefgh", ""),
    ],
)
async def test_exactly_the_unsettled_and_requeued_messages_are_redelivered_and_the_rejected_move_to_the_dlq(
    stage: Stage, acts: str, left: str, dead: str
) -> None:
    await stage.publish(*"abcdefgh")
    worker = stage.start()
    named = {each.body.decode(): each for each in await worker.got(8)}
    if any(part in acts for part in "012"):
        named |= {str(part.part): part for part in worker.consumer.split(named["a"], 3)}
    stray = Delivery(99, named["a"].generation, b"", redelivered=False)

    for word in acts.split():
        chosen = [named[name] for name in word[1:]]
        if word[0] == "+":
            worker.ack([*chosen, stray])
        for delivery in chosen if word[0] in "-~" else ():
            (worker.consumer.reject if word[0] == "-" else worker.consumer.requeue)(delivery)

    is_requeued = {"~c +bad": "c", "~0 -2 +1": "a"}.get(acts)
    if is_requeued:
        again = (await worker.got(9))[8]
        assert (again.body.decode(), again.redelivered) == (is_requeued, True)
    assert worker.consumer.outstanding == len(left)
    await stage.has_after(worker, *left)
    taken = await stage.rabbit.take_all(stage.topology.dlq, len(dead))
    assert [message.body.decode() for message in taken] == list(dead)
    assert all(message.properties.headers["x-death"][0]["reason"] == "rejected" for message in taken)
    assert (worker.losses, len(worker.deliveries)) == (0, 9 if is_requeued else 8)


async def test_after_a_forced_close_old_deliveries_and_their_parts_are_void(stage: Stage, proxy: Proxy) -> None:
    await stage.publish("a", "b", "c")
    worker = stage.start(proxy.url)
    old = await worker.got(3)
    worker.ack(old[:1])
    old_parts = worker.consumer.split(old[2], 2)
    worker.consumer.requeue(old_parts[0])
    await stage.has()

    proxy.tell_clients(frame.Method(0, spec.Connection.Close(320, "CONNECTION_FORCED", 0, 0)).marshal())
    await worker.lost(1)
    again = await worker.got(2)
    new_parts = worker.consumer.split(again[1], 2)
    worker.ack([*old, *old_parts, new_parts[0]])
    worker.consumer.reject(old[1])

    assert [(each.body, each.redelivered) for each in again] == [(b"b", True), (b"c", True)]
    assert worker.consumer.outstanding == 2
    worker.ack([again[0], *new_parts])
    await stage.has_after(worker)
    assert worker.losses == 1


async def test_the_consumer_waits_for_a_missing_queue(amqp_url: str, undeclared: Topology, rabbit: Rabbit) -> None:
    async with staged(amqp_url, undeclared, rabbit) as stage:
        with capture_logs() as logs:
            worker = stage.start()
            await until(lambda: any("Run `dispatcher init`" in str(log) for log in logs))
            looked_at = time.monotonic()
            await until(lambda: time.monotonic() > looked_at + 1.5 * LOOK_SECONDS)
        assert [log["event"] for log in logs].count("broker.queue_missing") == 1
        await declare(amqp_url, undeclared)
        await stage.publish("a")

        assert bodies(await worker.got(1)) == ["a"]
        assert worker.losses == 0


async def test_a_queue_is_not_consumed_in_the_moment_of_its_deletion(own_stage: Stage, proxy: Proxy) -> None:
    await own_stage.publish("before")
    worker = own_stage.start(proxy.url)
    worker.ack(await worker.got(1))  # RabbitMQ may keep a queue whose consumer starts during the deletion
    await own_stage.has()
    proxy.freeze()  # so that a consumer that looks for the queue at once finds the queue
    await own_stage.rabbit.delete_queue(own_stage.queue)
    await until(lambda: not worker.consumer.is_consuming)
    cancelled_at = time.monotonic()
    await declare(own_stage.amqp_url, own_stage.topology)
    await own_stage.publish("a")
    proxy.thaw()

    assert bodies(await worker.got(2)) == ["before", "a"]
    assert time.monotonic() - cancelled_at >= CANCELLED_SECONDS / 2
    assert worker.losses == 0


async def test_a_queue_that_is_deleted_between_look_and_consume_is_consumed_later(stage: Stage, proxy: Proxy) -> None:
    name = stage.queue.encode()
    consume = b"\x00\x3c\x00\x14\x00\x00" + bytes([len(name)]) + name
    proxy.change(consume, consume[:-1] + b"?")
    worker = stage.start(proxy.url)
    await until(lambda: consume in proxy.received)
    await until(lambda: proxy.connections == 2)
    proxy.change(b"", b"")
    await stage.publish("a")

    assert bodies(await worker.got(1)) == ["a"]
    await stage.has_after(worker, "a")


async def test_the_consumer_survives_a_channel_closed_by_rabbitmq_and_outages(stage: Stage, proxy: Proxy) -> None:
    worker = stage.start(proxy.url)
    timed_out = spec.Channel.Close(406, "PRECONDITION_FAILED - delivery acknowledgement timed out", 0, 0)
    await stage.publish("a")
    await worker.got(1)
    proxy.tell_clients(frame.Method(1, timed_out).marshal())
    await worker.lost(1)
    (delivery,) = await worker.got(1)
    assert delivery.body == b"a"
    for number in range(5):
        worker.ack([delivery])
        await stage.has()
        proxy.cut()
        await worker.lost(2 + number)
        await worker.consuming()
        await stage.publish(str(number))
        (delivery,) = await worker.got(1)
    await stage.has_after(worker, "4")


async def test_cancel_stops_deliveries_and_still_allows_acks_also_after_a_pause(stage: Stage) -> None:
    await stage.publish(*"abcdef")
    worker = stage.start(prefetch=4)
    at_hand = await worker.got(4)

    await worker.consumer.cancel()
    await worker.consumer.cancel()
    worker.ack(at_hand[:1])
    worker.consumer.pause()
    worker.ack(at_hand[1:2])
    await stage.publish("g")

    assert not worker.consumer.is_consuming
    assert not worker.task.done()
    await stage.has_after(worker, *"cdefg")
    assert bodies(worker.deliveries) == ["a", "b", "c", "d"]
    assert worker.losses == 0


async def test_cancel_during_a_flood_loses_no_message(stage: Stage) -> None:
    names = [f"{number:04}" for number in range(300)]
    await stage.publish(*names)
    worker = stage.start(prefetch=300)
    await until(lambda: worker.deliveries)

    await worker.consumer.cancel()
    seen = bodies(worker.deliveries)
    worker.ack(worker.deliveries)

    # A quorum queue gets at most 32 commands immediately; RabbitMQ defers the rest. So RabbitMQ handles the acks only
    # after it has requeued the other messages.
    left = 300 - len(seen)
    await until_answer(lambda: depths(stage.amqp_url, stage.topology), lambda found: found[stage.queue] == left)
    await stage.has_after(worker, *(set(names) - set(seen)))
    assert bodies(worker.deliveries) == seen


async def test_a_loss_after_cancel_calls_on_lost_and_ends_the_run(stage: Stage, proxy: Proxy) -> None:
    await stage.publish("a")
    worker = stage.start(proxy.url)
    (delivery,) = await worker.got(1)
    await worker.consumer.cancel()

    proxy.cut()
    await asyncio.wait_for(worker.task, 10)

    assert worker.losses == 1
    worker.ack([delivery])
    assert proxy.connections == 1
    await stage.has_after(worker, "a")


async def test_cancel_and_close_before_the_first_delivery_end_the_run(closed_port: int) -> None:
    url, patient = f"amqp://u:p@127.0.0.1:{closed_port}/", Backoff(base_seconds=3600, cap_seconds=3600)
    for stop in (Consumer.cancel, Consumer.close):
        worker = Worker(url, {"normal": "q"}, backoff=patient)
        await asyncio.sleep(0)
        await stop(worker.consumer)
        await asyncio.wait_for(worker.task, 10)


async def test_a_refused_login_calls_on_refused_and_other_tries_call_on_tried(stage: Stage, closed_port: int) -> None:
    parts = urlsplit(stage.amqp_url)
    refused = stage.start(urlunsplit(parts._replace(netloc=f"nobody:word@{parts.hostname}:{parts.port}")))
    unreached = stage.start(f"amqp://u:p@127.0.0.1:{closed_port}/")
    served = stage.start()

    await until(lambda: len(refused.tries) >= 2 and unreached.tries and served.tries)

    assert (set(refused.tries), set(unreached.tries), served.tries) == ({"refused"}, {"tried"}, ["tried"])


# Pauses.
async def test_resume_consumes_again_deliveries_from_before_are_void_and_a_second_pause_stops_it(stage: Stage) -> None:
    worker = stage.start()
    await stage.publish("a", "b")
    for losses in (1, 2, 3):
        old = await worker.got(2)
        worker.consumer.pause()
        worker.consumer.pause()
        await worker.lost(losses)

        worker.ack(old)
        worker.consumer.resume()
        worker.consumer.resume()
        worker.consumer.reject(old[0])

    again = await worker.got(2)
    assert all(each.redelivered for each in again)
    worker.ack(again)
    await until(lambda: worker.consumer.outstanding == 0)
    assert worker.losses == 3
    await stage.has_after(worker)


async def test_a_pause_at_any_moment_of_the_start_takes_effect(stage: Stage, proxy: Proxy) -> None:
    for turns in range(0, 60, 5):
        worker = stage.start(proxy.url)
        for _ in range(turns):
            await asyncio.sleep(0.0005)

        worker.consumer.pause()
        await until(lambda: not worker.consumer.is_consuming and proxy.is_idle)  # noqa: B023

        await stage.publish("a")
        await stage.has("a")


async def test_a_pause_during_an_outage_takes_effect_and_ends(stage: Stage, proxy: Proxy) -> None:
    worker = stage.start(proxy.url)
    await worker.consuming()
    proxy.cut()
    worker.consumer.pause()
    await until(lambda: worker.losses == 1 and proxy.is_idle)
    await stage.publish("a")
    await stage.has("a")

    worker.consumer.resume()
    await stage.publish("b")

    await worker.got(1)
    await stage.has_after(worker, "b")


@pytest.mark.parametrize("stop", [Consumer.cancel, Consumer.close])
async def test_a_paused_consumer_can_be_cancelled_and_resume_then_has_no_effect(
    stage: Stage, proxy: Proxy, stop: Callable[[Consumer], Awaitable[None]]
) -> None:
    worker = stage.start(proxy.url)
    await worker.consuming()
    worker.consumer.pause()
    await worker.lost(1)

    await stop(worker.consumer)
    worker.consumer.resume()

    await asyncio.wait_for(worker.task, 10)
    assert proxy.connections == 1


# Lanes.
async def test_a_paused_lane_is_not_consumed_until_it_is_resumed_and_the_other_lanes_are(own_stage: Stage) -> None:
    worker, lanes = own_stage.start(all_lanes=True, prefetch=1), own_stage.topology.lanes
    for lane in lanes:
        await own_stage.publish(lane, lane=lane)
    deliveries = await worker.got(3)  # one of each lane, beside the others' full windows
    assert {each.lane: each.body.decode() for each in deliveries} == {lane: lane for lane in lanes}

    await worker.consumer.pause_lane("bulk")
    worker.ack(deliveries)
    for lane in lanes:
        await own_stage.publish("later", lane=lane)
    await worker.got(5)
    assert (await depths(own_stage.amqp_url, own_stage.topology))[own_stage.topology.send_queues["bulk"]] == 1

    await worker.consumer.resume_lane("bulk")
    assert (await worker.got(6))[-1].lane == "bulk"


@pytest.mark.parametrize("is_reported", [True, False])
async def test_a_deleted_queue_stops_only_its_lane_until_it_exists_again_also_if_rabbitmq_does_not_report_it(
    own_stage: Stage, proxy: Proxy, is_reported: bool
) -> None:
    if not is_reported:  # as if the client asked for no report
        proxy.change(b"consumer_cancel_notifyt\x01", b"consumer_cancel_notifyt\x00")
    worker = own_stage.start(proxy.url, all_lanes=True, prefetch=2, check_seconds=60.0 if is_reported else 0.1)
    await own_stage.publish("of the deleted queue", lane="bulk")
    deliveries = await worker.got(1)

    with capture_logs() as logs:
        await own_stage.rabbit.delete_queue(own_stage.topology.send_queues["bulk"])
        await until(lambda: "broker.queue_missing" in {log["event"] for log in logs})
    worker.ack(deliveries)
    for number in range(6):
        await own_stage.publish(str(number), lane="urgent")
        worker.ack((await worker.got(2 + number))[-1:])
    assert (worker.losses, worker.consumer.outstanding) == (0, 0)

    await declare(own_stage.amqp_url, own_stage.topology)
    await own_stage.publish("of the new queue", lane="bulk")
    assert bodies(await worker.got(8))[-1] == "of the new queue"
    assert worker.losses == 0
