"""RabbitMQ fails or loses messages. No email is lost, because the state of each email is in PostgreSQL."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dispatcher.broker.topology import declare
from tests.acceptance.harness import WORKERS, Host, emails, stop
from tests.supervisor.program import Program, eventually

LEASE_SECONDS = 6
"""After half of this time, the relay treats a message as lost. The whole time is longer than any stall of a worker on a
busy machine."""


def delete_send_queue(host: Host, run: Program) -> None:
    """Delete the send queue, and wait until each worker has noticed that it is missing."""

    def is_missing() -> bool:
        # RabbitMQ keeps a queue, without its binding, if a consumer starts while the queue is being deleted. So delete
        # it until it is gone. (3.10 does not notify a consumer of a queue that is declared again within some 20 ms.)
        host.rabbit.delete(host.topology.queue)
        return len({event["worker"] for event in run.events("broker.queue_missing")}) == WORKERS

    eventually(is_missing, "each worker's report of the missing queue")


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_cut_connections_lose_and_repeat_nothing(host: Host, times: int) -> None:
    host.sink("--latency-ms", "10")
    ids = host.enqueue(emails(300 * times))
    run = host.run()
    pids = [run.pid_of(role) for role in ("worker 0", "worker 1", "relay")]

    closed: set[str] = set()
    for cut in range(times):
        host.await_delivered(100 + 300 * cut)
        # Close both workers' connections at the same time. Otherwise the second close could hit a new connection of the
        # first worker. The relay has a connection only while it has something to publish.
        eventually(lambda: len(host.rabbit.connections_of(pids[:2]).difference(closed)) == 2, "connections to close")
        closed.update(host.rabbit.connections_of(pids))
        host.rabbit.close_connections_of(pids)
        run.await_events("broker.connection_lost", cut + 1)

    books = host.await_finished(ids, seconds=60)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 300 * times}
    assert not run.events("process.exited", level="error")


def test_deleting_and_redeclaring_the_queue_loses_and_repeats_nothing(host: Host) -> None:
    host.sink("--latency-ms", "100")  # slow, so that the queue has messages to lose
    ids = host.enqueue(emails(600))
    run = host.run(PREFETCH=20, LEASE_SECONDS=LEASE_SECONDS)
    host.await_delivered(30)

    delete_send_queue(host, run)
    asyncio.run(declare(host.servers.amqp_url, host.topology))

    more = host.enqueue(emails(50, name="more"))
    books = host.await_finished(ids | more)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 650}
    assert run.events("relay.republished")


def test_purging_the_queue_loses_and_repeats_nothing(host: Host) -> None:
    host.sink("--latency-ms", "100")  # slow, so that the queue has messages to lose
    ids = host.enqueue(emails(600))
    run = host.run(PREFETCH=20, LEASE_SECONDS=LEASE_SECONDS)
    host.await_delivered(30)

    host.rabbit.purge(host.topology.queue)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 600}
    assert run.events("relay.republished")


def test_emails_wait_for_a_missing_send_queue_and_emails_of_other_lanes_do_not(host: Host) -> None:
    run = host.run()
    run.await_events("relay.leading")
    run.await_events("broker.connected", WORKERS)
    delete_send_queue(host, run)

    ids = host.enqueue(emails(50))
    others = host.enqueue(replace(each, lane="bulk") for each in emails(50, name="bulk"))

    run.await_events("relay.unroutable")
    eventually(lambda: {host.rows()[email_id].status for email_id in others} == {"sent"}, "the other lane's emails")
    asyncio.run(declare(host.servers.amqp_url, host.topology))
    books = host.await_finished(ids | others)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 100}


def test_dead_letters_wait_for_a_missing_dlq_and_emails_do_not(host: Host) -> None:
    host.sink()
    run = host.run()
    run.await_events("relay.leading")
    host.rabbit.delete(host.topology.dlq)
    refused = host.enqueue(emails(10, name="refused", to=lambda number: f"refused-{number}@example.org"))
    good = host.enqueue(emails(50, name="good"))
    run.await_events("relay.unroutable")
    eventually(lambda: all(row.is_final for row in host.rows().values()))

    asyncio.run(declare(host.servers.amqp_url, host.topology))

    books = host.await_finished(refused | good)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"failed": 10, "sent": 50}
