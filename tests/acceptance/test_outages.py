"""Servers that go away and come back while it works, on a set of servers of its own.

However they go, and whatever is stopped meanwhile: no email is lost or sent twice, and while the workers live none is
held, because they keep what the provider said until it is recorded.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import AMQP_URL, DATABASE_URL, MANAGEMENT_URL, start
from dispatcher.dev.servers import stop as stop_servers
from tests.acceptance.harness import CONNECTIONS, WORKERS, Host, emails, stop
from tests.acceptance.outages import POSTGRES, RABBITMQ, Removable
from tests.acceptance.test_metrics import address_of, failing
from tests.supervisor.program import Program, eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def removable() -> Iterator[Removable]:
    """Servers for this module alone, whatever servers the environment names."""
    with tempfile.TemporaryDirectory(prefix="dispatcher-outages-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "servers"
        for variable in (DATABASE_URL, AMQP_URL, MANAGEMENT_URL):
            patch.delenv(variable, raising=False)
        servers = start(folder, progress=print, owner_pid=os.getpid())
        patch.undo()
        yield Removable(servers)
        stop_servers(folder)


@pytest.fixture(scope="module")
def lasting(removable: Removable) -> Topology:
    """Queues that are older than any outage.

    RabbitMQ writes declarations to the disk after up to some seconds: a node that is killed before comes back with a
    queue that lacks its binding or its leader. That is not what is tested here.
    """
    topology = Topology("outages", "outages.send", "outages.dlq")
    asyncio.run(declare(removable.servers.amqp_url, topology))
    return topology


@pytest.fixture
def host(tmp_path: Path, removable: Removable, lasting: Topology) -> Iterator[Host]:
    """A host on those servers, with a database of its own and queues that are empty."""
    name = f"outage_{secrets.token_hex(6)}"
    with psycopg.connect(removable.servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    url = urlunsplit(urlsplit(removable.servers.database_url)._replace(path=f"/{name}"))
    opened = Host(tmp_path, removable.servers, url, lasting)
    assert opened.command("init").await_exit() == 0
    for queue in lasting.queues:
        opened.rabbit.purge(queue)
    yield opened
    opened.destroy()
    removable.restore()


def await_long_outage(run: Program) -> None:
    """Waits until the pool has given up to wait for PostgreSQL, which takes seconds, in each worker."""

    def slots() -> set[str]:
        lost = run.events("store.connection_lost")
        return {event["worker"] for event in lost if "connection failed" in event["reason"]} - {
            "relay",
            "monitor",
        }

    eventually(lambda: len(slots()) == WORKERS)


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGKILL, signal.SIGINT])
def test_postgresql_is_restarted(host: Host, removable: Removable, number: signal.Signals) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(800))
    run = host.run()
    host.await_delivered(200)

    removable.take_away(POSTGRES, number)
    await_long_outage(run)
    removable.bring_back(POSTGRES)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 800}
    assert not run.events("process.exited", level="error")


def test_postgresql_blinks_again_and_again(host: Host, removable: Removable) -> None:
    host.sink("--latency-ms", "10")
    ids = host.enqueue(emails(2000))
    run = host.run()

    for _ in range(5):
        host.await_delivered(min(1900, len(host.recipient.delivered()) + 100))
        removable.take_away(POSTGRES, signal.SIGQUIT)
        removable.bring_back(POSTGRES)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 2000}


def test_workers_that_die_while_postgresql_is_away_leave_their_answers_in_the_ledger(
    host: Host, removable: Removable
) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(600))
    run = host.run()
    host.await_delivered(150)
    removable.take_away(POSTGRES, signal.SIGQUIT)
    run.await_events("store.connection_lost", 4)

    run.send_all(signal.SIGKILL)
    run.await_exit()
    delivered = set(host.recipient.delivered())
    removable.bring_back(POSTGRES)
    second = host.run()

    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    # What was answered before the kill is known, although it was never recorded while they lived.
    assert len(books.by_status.get("held", frozenset()) & delivered) <= WORKERS * CONNECTIONS
    assert books.count("held") <= WORKERS * CONNECTIONS
    assert books.count("sent") + books.count("held") == 600


def test_a_stop_while_postgresql_is_away_ends_in_time_and_the_next_run_settles_it(
    host: Host, removable: Removable
) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(600))
    run = host.run(DRAIN_SECONDS=1)
    host.await_delivered(150)
    removable.take_away(POSTGRES, signal.SIGQUIT)
    run.await_events("store.connection_lost", 4)

    run.send(signal.SIGTERM)

    # Their results could not be recorded: they were killed, and say so.
    assert run.await_exit() == 1
    removable.bring_back(POSTGRES)
    second = host.run()
    second.await_events("ledger.settled", WORKERS)
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 600}


def test_a_hung_postgresql_delays_and_harms_nothing(host: Host, removable: Removable) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(600))
    run = host.run(DRAIN_SECONDS=1)
    host.await_delivered(150)

    removable.freeze(POSTGRES)
    run.send(signal.SIGTERM)
    assert run.await_exit() == 1
    removable.thaw(POSTGRES)

    second = host.run()
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 600}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_rabbitmq_is_restarted(host: Host, removable: Removable, number: signal.Signals) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(800))
    run = host.run()
    host.await_delivered(200)

    removable.take_away(RABBITMQ, number)
    more = host.enqueue(emails(100, name="more"))
    removable.bring_back(RABBITMQ)

    books = host.await_finished(ids | more, seconds=60)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 900}
    assert not run.events("process.exited", level="error")


@pytest.mark.parametrize("takes_away", [True, False])
def test_a_stop_while_rabbitmq_is_away_or_hangs_is_a_clean_drain(
    host: Host, removable: Removable, *, takes_away: bool
) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(600))
    run = host.run(DRAIN_SECONDS=10)
    host.await_delivered(150)
    if takes_away:
        removable.take_away(RABBITMQ)
        run.await_events("broker.connection_lost", WORKERS)
    else:
        removable.freeze(RABBITMQ)

    stop(run, seconds=15)

    statuses = {row.status for row in host.rows().values()}
    assert statuses <= {"sent", "pending"}
    removable.restore()
    second = host.run()
    second.await_events("relay.leading")
    books = host.await_finished(ids, seconds=60)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 600}


def test_a_run_that_starts_before_its_servers_sends_what_waits_when_they_come(host: Host, removable: Removable) -> None:
    ids = host.enqueue(emails(200))
    removable.take_away(POSTGRES)
    removable.freeze(RABBITMQ)  # were it gone, it would come back with the other one

    run = host.run()

    run.await_events("store.connection_lost")
    removable.bring_back(POSTGRES)
    run.await_events("broker.connection_lost")
    removable.thaw(RABBITMQ)
    books = host.await_finished(ids, seconds=60)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 200}


def test_commits_that_hang_are_seen_by_readyz_and_doctor(host: Host, removable: Removable) -> None:
    """As where the only synchronous standby is away: PostgreSQL answers everything, and no commit returns."""
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(400))
    run = host.run(METRICS_ADDRESS="127.0.0.1:0")
    address = address_of(run)
    host.await_delivered(40)
    with psycopg.connect(removable.servers.database_url, autocommit=True) as session:
        session.execute("alter system set synchronous_standby_names = 'nobody'")
        session.execute("select pg_reload_conf()")
        try:
            eventually(lambda: failing(address) == ["commits"], "/readyz", seconds=60)
            looked = host.command("doctor")
            code = looked.await_exit()
        finally:
            session.execute("alter system reset synchronous_standby_names")
            session.execute("select pg_reload_conf()")

    assert code == 1
    assert "did not commit a small write within 5 s" in looked.log
    assert "synchronous_standby_names is 'nobody'" in looked.log
    books = host.await_finished(ids, seconds=120)
    eventually(lambda: failing(address) == [], "readiness")
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 400}
