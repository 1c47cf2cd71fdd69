"""RabbitMQ goes away, or loses what it was given: the database is the truth, a message is only a hint."""

from __future__ import annotations

import asyncio

from dispatcher.broker.topology import declare
from tests.acceptance.harness import Host, emails, stop
from tests.supervisor.program import eventually


def test_connections_that_are_cut_again_and_again_lose_and_repeat_nothing(host: Host) -> None:
    host.sink("--latency-ms", "10")
    ids = host.enqueue(emails(500))
    run = host.run()
    cut = 0

    for delivered in (50, 250):
        host.await_delivered(delivered)
        cut += eventually(lambda: host.rabbit.close_connections("dispatcher "), "connections to close")

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 500}
    assert cut >= 2
    assert run.events("broker.connection_lost")
    assert not run.events("process.exited", level="error")


def test_a_queue_that_is_deleted_and_declared_again_loses_and_repeats_nothing(host: Host) -> None:
    host.sink("--latency-ms", "10")
    ids = host.enqueue(emails(600))
    run = host.run(PREFETCH=20, LEASE_SECONDS=2)
    host.await_delivered(100)

    host.rabbit.delete(host.topology.queue)
    host.await_delivered(120)
    asyncio.run(declare(host.servers.amqp_url, host.topology))

    more = host.enqueue(emails(50, name="more"))
    books = host.await_finished(ids | more)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 650}
    assert run.events("relay.republished")


def test_a_queue_that_is_purged_loses_and_repeats_nothing(host: Host) -> None:
    host.sink("--latency-ms", "10")
    ids = host.enqueue(emails(600))
    run = host.run(PREFETCH=20, LEASE_SECONDS=2)
    host.await_delivered(100)

    host.rabbit.purge(host.topology.queue)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 600}
    assert run.events("relay.republished")


def test_dead_letters_wait_for_a_dlq_that_is_missing(host: Host) -> None:
    host.sink()
    host_run = host.run()
    host_run.await_events("relay.leading")
    host.rabbit.delete(host.topology.dlq)
    refused = host.enqueue(emails(10, name="refused", to=lambda number: f"refused-{number}@example.org"))
    good = host.enqueue(emails(50, name="good"))
    host_run.await_events("relay.unroutable")
    eventually(lambda: all(row.is_final for row in host.rows().values()))

    asyncio.run(declare(host.servers.amqp_url, host.topology))

    books = host.await_finished(refused | good)
    stop(host_run)
    books.assert_balanced()
    assert books.counts == {"failed": 10, "sent": 50}
