"""Tests the monitor's pages while real servers are healthy or faulty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings, load
from dispatcher.dev.servers import Servers
from dispatcher.host.process_table import ProcessTable
from dispatcher.host.web_server import WebServer
from dispatcher.monitor.pages import pages_of, poll_of_queues
from dispatcher.store.connections import Pool, make_pool, session
from dispatcher.store.figures import count_for_monitor
from dispatcher.telemetry import metric_files
from tests.store.books import Books
from tests.telemetry.counting import parsed
from tests.waiting import until, until_answer


class Monitor:
    def __init__(self, server: WebServer) -> None:
        self._server = server

    async def get(self, path: str) -> tuple[int, bytes]:
        await until(lambda: self._server.address is not None)
        assert self._server.address is not None
        reader, writer = await asyncio.open_connection(self._server.address.host, self._server.address.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        reply = await reader.read()
        writer.close()
        head, _, body = reply.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    async def failing(self) -> list[str] | None:
        """The failing checks; None until each server has answered."""
        status, body = await self.get("/readyz")
        said = orjson.loads(body)
        names = [name for name, check in said["checks"].items() if not check["ok"]]
        assert (status == 200) == (said["status"] == "ok") == (names == [])
        return None if b"has not answered yet" in body else names

    async def metrics(self) -> dict[str, float]:
        status, body = await self.get("/metrics")
        assert status == 200
        return parsed(body.decode())


@pytest.fixture
def settings(servers: Servers, tables_url: str, topology: Topology, tmp_path: Path) -> Settings:
    environ = {"DATABASE_URL": tables_url, "AMQP_URL": servers.amqp_url, "EXCHANGE": topology.exchange}
    environ |= {"QUEUE": topology.queue, "DLQ": topology.dlq, "RUN_DIR": str(tmp_path)}
    environ |= {"METRICS_ADDRESS": "127.0.0.1:0"}
    return load({f"DISPATCHER_{name}": value for name, value in environ.items()})


@asynccontextmanager
async def monitoring(settings: Settings) -> AsyncIterator[Monitor]:
    queues = poll_of_queues(settings)
    async with make_pool(settings.database_url, name="monitor", size=1) as pool:
        tasks = [queues, *pages_of(settings, pool, ProcessTable([]), queues)]
        running = [asyncio.create_task(task.run()) for task in tasks]
        try:
            yield Monitor(next(task for task in tasks if isinstance(task, WebServer)))
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def test_a_host_without_workers_fails_the_consumers_check(settings: Settings, books: Books) -> None:
    books.enqueue()
    metric_files.wipe(settings.metrics_folder)
    (settings.metrics_folder / "counter_w0-0.db").touch()  # metrics are served although a file is broken

    async with monitoring(settings) as monitor:
        failing = await until_answer(monitor.failing)
        samples = await monitor.metrics()

    assert failing == ["consumers"]
    assert samples['dispatcher_current_emails{status="pending"}'] == 1
    assert samples["dispatcher_oldest_pending_seconds"] > 0
    assert samples["dispatcher_relay_lag_seconds"] > 0
    assert samples['dispatcher_queue_messages{queue="dlq"}'] == 0
    assert samples['dispatcher_failing_checks{check="consumers"}'] == 1
    assert samples['dispatcher_failing_checks{check="database"}'] == 0
    assert samples['dispatcher_metrics_skipped_files{reason="empty"}'] == 1
    assert len([name for name in samples if name.startswith("dispatcher_build_info")]) == 1


async def test_a_missing_queue_fails_the_topology_check_and_a_database_without_tables_the_schema_check(
    settings: Settings, topology: Topology, empty_database_url: str
) -> None:
    faulty = replace(settings, database_url=empty_database_url, dlq=f"{topology.dlq}.missing")
    async with monitoring(faulty) as monitor:
        failing = await until_answer(monitor.failing)
        samples = await monitor.metrics()

    assert failing == ["schema", "topology"]
    names = ("dispatcher_queue_messages", "dispatcher_current_emails")
    assert not [name for name in samples if name.startswith(names)]


async def test_an_unreachable_server_is_reported_without_the_servers_text(settings: Settings) -> None:
    away = replace(settings, amqp_url="amqp://bob:secret@127.0.0.1:9/")
    async with monitoring(away) as monitor:
        failing = await until_answer(monitor.failing)
        _, body = await monitor.get("/readyz")
        samples = await monitor.metrics()
        status, _ = await monitor.get("/healthz")

    assert failing == ["broker"]
    assert b"RabbitMQ is not available." in body
    assert b"bob" not in body
    assert b"127.0.0.1" not in body
    assert status == 200
    assert "dispatcher_oldest_pending_seconds" in samples
    assert not [name for name in samples if name.startswith("dispatcher_queue_messages")]


async def test_a_partly_covered_hour_counts_by_that_part(pool: Pool, books: Books) -> None:
    now = datetime.now(UTC)
    this_hour = now.replace(minute=0, second=0, microsecond=0)
    insert = "insert into email_hourly values (%s, 'smtp', 'accepted', 'a', %s)"
    for hours, count in ((0, 60), (1, 600), (30, 5000)):
        books.connection.execute(insert, [this_hour - timedelta(hours=hours), count])

    async with session(pool) as opened:
        stock = await count_for_monitor(opened)

    past = (now - this_hour).total_seconds() / 3600
    assert stock.sent_last_hour == pytest.approx(60 + 600 * (1 - past), abs=5)
    assert stock.sent_last_day == pytest.approx(660, abs=0.1)
