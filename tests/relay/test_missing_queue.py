"""A lane whose send queue does not exist: its emails wait for the queue, and the relay goes on with the other lanes.

The relay binds a queue that has lost its binding."""

from __future__ import annotations

import time

from structlog.testing import capture_logs

from dispatcher.broker.topology import Topology, declare
from dispatcher.config import Settings
from dispatcher.domain.status import Status
from dispatcher.store.leases import LeaseStore
from tests.broker.rabbit import Rabbit
from tests.relay.running import Start
from tests.relay.test_fairness import due, enqueue_in
from tests.store.books import Books
from tests.store.results import result
from tests.waiting import until

IDLE_PER_SECOND = 150
"""More transactions than an idle relay commits per second."""


async def test_the_relay_goes_on_with_the_other_lanes_and_does_not_poll_faster(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, topology: Topology
) -> None:
    def committed() -> int:
        (row,) = books.select("select xact_commit from pg_stat_database where datname = current_database()")
        return int(row["xact_commit"])

    await rabbit.delete_queue(settings.queue_of("bulk"))
    enqueue_in(books, "bulk", 20, "news")
    await start(settings)
    began_at, before = time.monotonic(), committed()
    await until(lambda: time.monotonic() > began_at + 2.5)  # PostgreSQL counts a transaction up to a second late
    assert committed() - before < IDLE_PER_SECOND * (time.monotonic() - began_at)

    urgent = enqueue_in(books, "urgent", 20)
    first = await rabbit.take_all(settings.queue_of("urgent"), 20)
    assert {message.pointer.email_id for message in first} == set(urgent)
    assert due(books, "news") == 20

    await declare(settings.amqp_url, topology)
    await until(lambda: due(books, "news") == 0)


async def test_a_send_queue_that_has_lost_its_binding_is_bound_again(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, topology: Topology
) -> None:
    queue = settings.queue_of("bulk")
    await rabbit.unbind_queue(queue, topology.exchange)
    ids = enqueue_in(books, "bulk", 20, "news")

    with capture_logs() as logs:
        await start(settings)
        messages = await rabbit.take_all(queue, 20)

    assert {message.pointer.email_id for message in messages} == set(ids)
    (returned,) = [log for log in logs if log["event"] == "relay.unroutable"]
    assert (returned["queue"], returned["count"]) == (queue, 20)
    assert "has bound it now" in returned["reason"]


async def test_a_dlq_that_has_lost_its_binding_is_bound_again(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, topology: Topology, store: LeaseStore
) -> None:
    await rabbit.unbind_queue(topology.dlq, topology.exchange)
    (lease,) = await store.lease(books.keys([books.enqueue_one()]), 60)
    await store.record([result(lease, Status.FAILED)])

    await start(settings)

    (message,) = await rabbit.take_all(topology.dlq, 1)
    assert message.pointer.email_id == lease.email_id


async def test_the_log_says_that_a_queue_is_missing(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await rabbit.delete_queue(settings.queue)
    books.enqueue(1)

    with capture_logs() as logs:
        await start(settings)
        await until(lambda: "relay.unroutable" in {log["event"] for log in logs})

    (reason, *_) = [log["reason"] for log in logs if log["event"] == "relay.unroutable"]
    assert f"no queue '{settings.queue}'" in reason
    assert "Run `dispatcher init`" in reason
