"""If RabbitMQ loses a message, the relay publishes the email again."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from dispatcher.broker import pointer
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from dispatcher.recovery.lost_message import LostMessages
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.broker.rabbit import Rabbit
from tests.recovery.tally import counted
from tests.relay.running import Start, settings_for
from tests.store.books import Books
from tests.waiting import until

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = 3600.0
FOR_EVER = HOUR


async def test_an_email_overtaken_by_later_ones_is_published_again_while_the_queue_is_full(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, store: LeaseStore, rabbit: Rabbit
) -> None:
    lost, being_sent, *waiting = books.enqueue(12)
    books.connection.execute("update email_log set publish_due_at = null, published_at = now() - interval '1 minute'")
    books.change(being_sent, published_at=datetime.now(UTC))
    await store.lease(books.keys([being_sent]), 60)
    for email_id in waiting:
        # This time is in the future, so the relay counts all of these emails as published later, even if the test is
        # slow.
        books.change(email_id, published_at=datetime.now(UTC) + timedelta(seconds=50))
        await rabbit.publish(topology.queue, pointer.encode(pointer.Pointer(email_id, books.key(email_id))))

    await start(settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS="1"))

    messages = await rabbit.take_all(topology.queue, len(waiting) + 1)
    assert messages[-1].pointer.email_id == lost


async def test_a_lost_message_from_before_a_clock_jump_back_is_published_again(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, publish_due_at=None, published_at=datetime.now(UTC) + timedelta(hours=1))

    with counted() as counts:
        await start(settings)
        (message,) = await rabbit.take_all(settings.queue, 1)
        await until(lambda: counts)

    assert message.pointer.email_id == email_id
    assert counts == Counter({("rescued", "message_lost"): 1})


@pytest.mark.parametrize(("share_of_a_lease", "is_lost"), [(0.4, False), (0.6, True)])
async def test_a_message_counts_as_lost_half_a_lease_after_it_was_published(
    servers: Servers, tables_url: str, topology: Topology, books: Books, share_of_a_lease: float, is_lost: bool
) -> None:
    settings = settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS="3600")
    email_id = books.enqueue_one()
    published_at = datetime.now(UTC) - timedelta(seconds=share_of_a_lease * HOUR)
    books.change(email_id, publish_due_at=None, published_at=published_at)

    async with await connect_async(tables_url, name="test relay") as session:
        publisher = Publisher(settings.amqp_url, settings.exchange, name="test relay")
        await LostMessages(settings, Outbox(session), publisher.find).run_once()
        await publisher.close()

    assert (books.row(email_id)["publish_due_at"] is not None) == is_lost
