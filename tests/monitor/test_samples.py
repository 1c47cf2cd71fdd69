"""What a monitor measures: a sample per minute, the processes of its host, the facts for alerts also beside damaged
rows, and the depth of the DLQ, as a number or as an error within seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from dispatcher.broker.management import Management
from dispatcher.broker.topology import FoundQueue, Topology
from dispatcher.config import Settings, load
from dispatcher.dev.servers import Servers
from dispatcher.errors import BrokerUnavailable, StoreUnavailable
from dispatcher.host.process_table import ProcessTable
from dispatcher.monitor.dlq_depth import by_management, depth_of_dlq
from dispatcher.monitor.samples import SAMPLE_SECONDS, HostReporting, MinuteSampling
from dispatcher.store.alerts import AlertStore
from dispatcher.store.connections import Pool, session
from dispatcher.store.figures import count_for_monitor, list_workers, measure_latency
from dispatcher.store.retention import Retention
from dispatcher.store.samples import QueueDepth, list_samples
from tests.broker.rabbit import Rabbit
from tests.monitor.hosts import host
from tests.providers.listeners import listening
from tests.store.books import Books
from tests.store.damage import disk_full
from tests.store.damaged_rows import insert_damaged
from tests.waiting import until_answer


def settings_of(**environ: str) -> Settings:
    return load({f"DISPATCHER_{name}": value for name, value in environ.items()})


@pytest.fixture
def settings(tables_url: str) -> Settings:
    lanes = {"QUEUE": "send", "DLQ": "dead", "LANES": "normal,bulk"}
    return settings_of(DATABASE_URL=tables_url, AMQP_URL="amqp://unused.invalid", **lanes)


def alert_store(tables_url: str) -> AlertStore:
    retention = Retention(30, 400, 0, 0, 180)
    return AlertStore(tables_url, queue="dead", holder="host-1:x", host="host-1", retention=retention, idle_seconds=60)


async def test_a_sample_has_queues_by_lane_and_counts_by_status(settings: Settings, pool: Pool, books: Books) -> None:
    books.enqueue(3)
    queues = {"send": FoundQueue(5, 2), "send.bulk": FoundQueue(6, 2), "dead": FoundQueue(7, 0)}

    seconds = await MinuteSampling(pool, settings, lambda: queues).run_once()
    await MinuteSampling(pool, settings, lambda: None).run_once()  # another host, a moment later

    (sample,) = await list_samples(pool, 60)
    assert sample.emails["pending"] == 3
    assert sample.queues == {"normal": QueueDepth(5, 2), "bulk": QueueDepth(6, 2), "dlq": QueueDepth(7, 0)}
    assert sample.oldest_pending_seconds is not None
    assert seconds is not None
    assert SAMPLE_SECONDS <= seconds <= 60, "the next is later if PostgreSQL answers slowly"


async def test_without_rabbitmq_a_sample_has_no_queues(settings: Settings, pool: Pool) -> None:
    await MinuteSampling(pool, settings, lambda: None).run_once()

    assert [sample.queues for sample in await list_samples(pool, 60)] == [None]


async def test_a_monitor_reports_its_hosts_processes_until_it_stops_in_an_orderly_way(
    tables_url: str, pool: Pool, books: Books
) -> None:
    table = ProcessTable(["worker", "relay"])
    slot = table.take_slot("worker", 3)
    slot.begin()
    slot.note_process(4711)
    slot.mark_up()
    slot.note_restart()

    await HostReporting(pool, table.statuses, slot.commit, holder="host-1:x", host="host-1").run_once()
    (row,) = books.select("select * from host_presence")
    await alert_store(tables_url).leave()

    (process,) = row["processes"]
    assert (process["role"], process["number"], process["pid"], process["is_up"]) == ("worker", 3, 4711, True)
    assert process["restarts"] == 1
    assert row["version"]
    assert books.count("host_presence") == 0


async def test_a_monitor_waits_for_a_commit_while_postgresql_can_only_be_read(pool: Pool, books: Books) -> None:
    table = ProcessTable(["monitor"])
    slot = table.take_slot("monitor", 0)
    reporting = HostReporting(pool, table.statuses, slot.commit, holder="host-1:x", host="host-1")
    waits: list[float] = []
    with disk_full(books.connection, "insert or update on host_presence for each row"):
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await reporting.run_once()
            waits += [each.commit_wait_seconds for each in table.statuses() if each.commit_wait_seconds is not None]
    assert len(waits) == 2
    assert waits[1] >= waits[0]

    await reporting.run_once()

    assert table.statuses()[0].commit_wait_seconds is None


async def test_a_check_leaves_its_result_and_the_active_alerts_for_the_page(tables_url: str, books: Books) -> None:
    rows = []
    async with host(tables_url) as monitor:
        for messages in (3, None, 0):
            monitor.depth.messages = messages
            await monitor.run_once()
            rows += books.select("select * from alert_check")

    found, blind, calm = rows
    assert (found["host"], found["depth"], found["fault"]) == ("host-1", 3, None)
    assert [(alert["kind"], alert["count"]) for alert in found["alerts"]] == [("dead_letters", 3)]
    assert (blind["depth"], "503" in blind["fault"], "ann@" in blind["fault"]) == (None, True, False)
    assert (calm["depth"], calm["fault"], calm["alerts"]) == (0, None, [])


async def test_beside_damaged_rows_the_facts_for_alerts_and_the_counts_of_metrics_are_read(
    tables_url: str, pool: Pool, books: Books
) -> None:
    insert_damaged(books)
    other = books.enqueue_one()
    books.change(other, created_at=datetime.now(UTC) - timedelta(days=1))
    store = alert_store(tables_url)

    found = await store.find()
    await store.leave()
    async with session(pool) as opened:
        counts = await count_for_monitor(opened)
        await measure_latency(opened)
        workers = await list_workers(opened)

    assert found.due > 0
    assert counts.oldest_pending_seconds is not None
    assert counts.longest_due_seconds is not None
    assert [worker.name for worker in workers] == ["gone:w1:1:a"]


FIGURES = b'{"messages": 4, "messages_ready": 3, "messages_unacknowledged": 1, "consumers": 1}'
BARE = b'{"name": "new.dlq"}'


def answering(*bodies: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """The server function of a fake management API, which sends these responses, one per connection."""
    left = list(bodies)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = left.pop(0)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    return answer


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends a response that never ends, with only short pauses."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.01)


def probe_at(port: int, *, seconds: float = 5) -> Callable[[], Awaitable[int]]:
    management = Management(f"http://u:p@127.0.0.1:{port}", timeout_seconds=seconds)
    return by_management(management, "new.dlq", lag_seconds=0)


@pytest.mark.parametrize("bodies", [[FIGURES], [BARE, FIGURES]], ids=["messages of a consumer count", "asked again"])
async def test_the_management_api_counts(bodies: list[bytes]) -> None:
    async with listening(answering(*bodies)) as port:
        assert await probe_at(port)() == 4


async def test_a_response_that_drips_for_ever_fails_at_the_total_deadline() -> None:
    began_at = time.monotonic()
    async with listening(drip) as port:
        with pytest.raises(BrokerUnavailable, match=r"did not answer within 0\.3 s"):
            await probe_at(port, seconds=0.3)()

    # Each byte arrives in time. Without a total deadline, the read would never end.
    assert time.monotonic() - began_at < 15


async def test_without_the_management_api_amqp_counts_and_that_is_logged_once(
    servers: Servers, topology: Topology, rabbit: Rabbit
) -> None:
    with capture_logs() as logs:
        names = {"EXCHANGE": topology.exchange, "QUEUE": topology.queue, "DLQ": topology.dlq}
        probe = depth_of_dlq(settings_of(AMQP_URL=servers.amqp_url, **names))
        await rabbit.publish(topology.dlq, b"dead")
        await until_answer(probe, lambda depth: depth == 1)

    assert [log["event"] for log in logs] == ["dlq.depth_inexact"]
