"""A lane whose send queue does not exist: its emails wait for the queue, and the relay goes on with the other lanes."""

from __future__ import annotations

import time

from dispatcher.broker.topology import Topology, declare
from dispatcher.config import Settings
from tests.broker.rabbit import Rabbit
from tests.relay.running import Start
from tests.relay.test_fairness import due, enqueue_in
from tests.store.books import Books
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
