"""One damaged row never stops the relay, and delays no other email."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.broker.rabbit import Rabbit
from tests.relay.running import Start, leader, settings_for
from tests.store.books import Books
from tests.store.damage import allow_damage
from tests.store.damaged_rows import DAMAGED, LEASED, PAST
from tests.waiting import until, until_answer


@pytest.mark.parametrize("damaged", DAMAGED)
async def test_the_relay_publishes_wakes_and_recovers_all_other_emails_beside_a_damaged_row(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit, damaged: str
) -> None:
    culprit, leased, due = books.enqueue(3)
    scheduled = books.enqueue_one(send_at=datetime.now(UTC) + timedelta(seconds=0.5))
    with allow_damage(books.connection):
        books.change(culprit, **{"wait_until": None, **DAMAGED[damaged]})
    books.change(leased, **LEASED, locked_until=PAST, publish_due_at=None)
    await start(settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS="1"))
    await until(lambda: leader(books) is not None)
    pid = leader(books)
    published: set[UUID] = set()

    async def are_published() -> bool:
        while message := await rabbit.take(topology.queue):
            published.add(message.pointer.email_id)
        return {due, scheduled} <= published

    await until_answer(are_published)
    await until(lambda: books.status(leased) == "held")

    assert leader(books) == pid
