"""PostgreSQL or RabbitMQ stops and restarts while the dispatcher runs: no email is lost, sent twice, or held."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import AMQP_URL, DATABASE_URL, MANAGEMENT_URL, start
from dispatcher.dev.servers import stop as stop_servers
from tests.acceptance.harness import WORKERS, Host, address_of, emails, failing, get, new_host, stop
from tests.acceptance.outages import POSTGRES, RABBITMQ, StoppableServers
from tests.supervisor.program import Program, eventually

pytestmark = pytest.mark.slow  # outages last longer than leases


@pytest.fixture(scope="module")
def stoppable() -> Iterator[StoppableServers]:
    """Servers for this module only, even if the environment has URLs of other servers."""
    with tempfile.TemporaryDirectory(prefix="dispatcher-outages-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "servers"
        for variable in (DATABASE_URL, AMQP_URL, MANAGEMENT_URL):
            patch.delenv(variable, raising=False)
        servers = start(folder, progress=print, owner_pid=os.getpid())
        patch.undo()
        yield StoppableServers(servers)
        stop_servers(folder)


@pytest.fixture(scope="module")
def lasting(stoppable: StoppableServers) -> Topology:
    """Queues that were declared before any outage.

    RabbitMQ writes declarations to disk some seconds late. If a node is killed before it has written them, it restarts
    with a queue that has no binding or no leader. These tests do not cover that case.
    """
    topology = Topology("outages", "outages.send", "outages.dlq")
    asyncio.run(declare(stoppable.servers.amqp_url, topology))
    return topology


@pytest.fixture
def host(tmp_path: Path, stoppable: StoppableServers, lasting: Topology) -> Iterator[Host]:
    with new_host(tmp_path, stoppable.servers, lasting) as opened:
        for queue in lasting.queues:
            opened.rabbit.purge(queue)
        yield opened
        stoppable.restore()


def assert_sent(host: Host, run: Program, ids: set[UUID]) -> None:
    books = host.await_finished(ids, seconds=120)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": len(ids)}


@pytest.mark.parametrize("hangs", [False, True], ids=["stopped", "hung"])
def test_a_stop_during_a_postgresql_outage_ends_in_time_and_the_next_run_settles_it(
    host: Host, stoppable: StoppableServers, *, hangs: bool
) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(600))
    run = host.run(DRAIN_SECONDS=1)
    host.await_delivered(150)
    if hangs:
        stoppable.freeze(POSTGRES)
    else:
        stoppable.stop(POSTGRES, signal.SIGQUIT)
        run.await_events("store.connection_lost", 4)

    run.send(signal.SIGTERM)

    # The processes could not record these results. They were killed, and the log reports it.
    assert run.await_exit() == 1
    stoppable.restore()
    second = host.run()
    second.await_events("ledger.settled", WORKERS)
    assert_sent(host, second, ids)


@pytest.mark.parametrize("takes_away", [True, False])
def test_without_rabbitmq_a_stop_is_a_clean_drain(host: Host, stoppable: StoppableServers, *, takes_away: bool) -> None:
    host.sink("--latency-ms", "100")
    ids = host.enqueue(emails(600))
    run = host.run(DRAIN_SECONDS=10)
    host.await_delivered(150)
    if takes_away:
        stoppable.stop(RABBITMQ)
        run.await_events("broker.connection_lost", WORKERS)
    else:
        stoppable.freeze(RABBITMQ)

    stop(run, seconds=15)

    assert {row.status for row in host.rows().values()} <= {"sent", "pending"}
    stoppable.restore()
    assert_sent(host, host.run(), ids)


def test_readyz_doctor_and_show_name_an_alarm_of_rabbitmq(host: Host, stoppable: StoppableServers) -> None:
    host.sink()
    run = host.run(METRICS_ADDRESS="127.0.0.1:0")
    address = address_of(run)
    before = host.enqueue(emails(20, name="before"))
    host.await_finished(before)
    eventually(lambda: failing(address) == [], "readiness")
    assert stoppable.set_watermark("0").wait() == 0
    try:
        ids = host.enqueue(emails(1500, name="during"))
        eventually(lambda: failing(address) == ["confirms"], "/readyz", seconds=60)
        readiness = get(address, "/readyz")[1]
        doctor = host.command("doctor")
        code = doctor.await_exit()
        show = host.command("show", str(max(ids)))
        show.await_exit()
    finally:
        assert stoppable.set_watermark("0.4").wait() == 0

    assert "short of memory or disk space" in readiness
    assert code == 1
    assert "it is short of memory. RabbitMQ accepts no messages" in doctor.log
    assert "short of memory or disk space" in show.log
    eventually(lambda: failing(address) == [], "readiness")
    assert_sent(host, run, before | ids)
