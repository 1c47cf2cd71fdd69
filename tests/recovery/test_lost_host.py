"""After a host is lost with its ledgers, recovery resends or holds the host's emails by policy. No live worker loses a
lease."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pytest

from dispatcher import enqueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.store.leases import LeaseStore
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Rabbit
from tests.recovery.tally import counted
from tests.relay.running import Start, leader, next_round, settings_for
from tests.store.books import Books, email
from tests.store.steered_clock import SteeredClock
from tests.waiting import until

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = 3600.0
FOR_EVER = HOUR


@pytest.mark.parametrize(("policy", "status", "queue"), [("hold", "held", "dlq"), ("resend", "pending", "queue")])
async def test_an_email_of_a_dead_host_is_judged_by_the_leading_hosts_policy(
    start: Start,
    servers: Servers,
    tables_url: str,
    topology: Topology,
    books: Books,
    rabbit: Rabbit,
    store: LeaseStore,
    policy: str,
    status: str,
    queue: str,
) -> None:
    email_id = books.enqueue_one()
    await store.lease(books.keys([email_id]), 60)
    books.change(email_id, locked_until=EXPIRED)
    settings = settings_for(servers.amqp_url, tables_url, topology, ON_UNCERTAIN=policy, LEASE_SECONDS="1")

    with counted() as counts:
        await start(settings)
        (message,) = await rabbit.take_all(getattr(settings, queue), 1)

    assert counts == Counter({("rescued", "lease_expired"): 1, ("held", "lease_expired"): int(status == "held")})
    assert message.pointer.email_id == email_id
    assert books.status(email_id) == status


async def test_after_a_long_outage_of_postgresql_live_workers_renew_before_recovery(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, store: LeaseStore, rabbit: Rabbit
) -> None:
    living, gone = books.enqueue(2)
    leases = {lease.email_id: lease for lease in await store.lease(books.keys([living, gone]), 60)}
    for email_id in (living, gone):
        books.change(email_id, locked_until=EXPIRED)

    await start(settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS="8"))
    await until(lambda: books.sessions("dispatcher relay"))
    enqueue(books.connection, email("next"))
    # Once this message arrives, the relay leads and has run each service once. The relay then observes the leases for
    # three quarters of LEASE_SECONDS.
    await rabbit.take_all(topology.queue, 1)

    assert await store.renew({living: leases[living].token}, 60) == {living}
    await until(lambda: books.status(gone) == "held")
    assert books.status(living) == "sending"


async def test_without_rabbitmq_everything_stays_due_and_recovery_continues(
    start: Start, tables_url: str, topology: Topology, books: Books, store: LeaseStore
) -> None:
    due, expired = books.enqueue(2)
    await store.lease(books.keys([expired]), 60)
    books.change(expired, locked_until=EXPIRED)

    await start(settings_for("amqp://nobody:secret@127.0.0.1:1/%2F", tables_url, topology, LEASE_SECONDS="1"))

    await until(lambda: books.status(expired) == "held")
    assert books.row(due)["publish_due_at"] is not None


async def test_a_jump_of_postgresqls_clock_takes_no_lease_from_a_renewing_worker_of_another_host(
    clock: SteeredClock,
    start: Start,
    servers: Servers,
    tables_url: str,
    topology: Topology,
    books: Books,
    store: LeaseStore,
    other_store: LeaseStore,
) -> None:
    living, gone = books.enqueue(2)
    leases = {lease.email_id: lease for lease in await store.lease(books.keys([living, gone]), 60)}
    await start(settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS="12"))
    await next_round(books)

    clock.set(HOUR)

    while books.status(gone) == "sending":
        for _ in range(2):  # at least one of these rounds queries for leases
            await next_round(books)
        assert await store.renew({living: leases[living].token}, 60) == {living}
        assert await other_store.lease(books.keys([living]), 60) == []
    assert books.statuses() == {"sending": 1, "held": 1}


@pytest.mark.slow
async def test_if_no_relay_reaches_rabbitmq_the_leader_stays_and_recovers(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, store: LeaseStore
) -> None:
    async with Proxy(servers.amqp_url) as proxy:
        for _ in range(2):
            await start(settings_for(proxy.url, tables_url, topology, LEASE_SECONDS="6"))
        first = await until(lambda: leader(books))
        await until(lambda: len(books.sessions("dispatcher relay")) == 2)
        proxy.sever()
        email_id = books.enqueue_one()
        await store.lease(books.keys([email_id]), 60)
        books.change(email_id, locked_until=EXPIRED)

        await until(lambda: books.status(email_id) == "held")  # this takes longer than a change of the leader would

        assert leader(books) == first
