"""Many copies of one message are delivered: PostgreSQL lets one worker send the email once."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson
import psycopg

from dispatcher import enqueue_many
from dispatcher.broker.management import CountsUnavailable, Management
from tests.acceptance.double import Double
from tests.acceptance.harness import WORKERS, Host, emails, stop
from tests.supervisor.program import eventually

TIMES = 100


def waiting_workers(host: Host) -> set[str]:
    """The workers whose statements wait for a lock."""
    statement = """
        select application_name from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'
    """
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        return {name for (name,) in connection.execute(statement) if ":w" in name}


def is_used_up(host: Host) -> bool:
    """Whether the workers have acked everything; RabbitMQ's report lags by some seconds."""
    with suppress(CountsUnavailable):
        depth = asyncio.run(Management(host.servers.management_url, timeout_seconds=30).depth(host.topology.queue))
        return (depth.messages, depth.consumers) == (0, WORKERS)
    return False


def test_a_message_published_a_hundred_times_to_two_workers_sends_one_email(host: Host) -> None:
    double = Double(host.folder / "double", "--latency-ms", "100")
    host.recipient = double
    with psycopg.connect(host.database_url) as connection:
        enqueued = enqueue_many(connection, emails(8))
    ids = {email.email_id for email in enqueued}
    pointers = [
        orjson.dumps({"v": 1, "email_id": email.email_id, "message_key": email.message_key}) for email in enqueued
    ]
    host.rabbit.publish(host.topology.queue, *(TIMES * pointers))

    with psycopg.connect(host.database_url) as connection:
        # Lock the rows until both workers have requested the same leases, so that neither gets them first.
        connection.execute("select from email_log for update")
        run = host.run(PREFETCH=64)
        asked: set[str] = set()  # collected over all checks, because a worker waits only briefly

        def both_have_asked() -> bool:
            asked.update(waiting_workers(host))
            return len(asked) == 2

        eventually(both_have_asked, "two workers that want the same leases")

    books = host.await_finished(ids)
    eventually(lambda: is_used_up(host), "the acks of all copies")
    stop(run)
    double.kill()
    books.assert_balanced()
    assert books.counts == {"sent": 8}
    assert double.delivered() == dict.fromkeys(ids, 1)
    assert len(double.requests()) == 8
    assert not host.rabbit.waiting(host.topology.queue)
