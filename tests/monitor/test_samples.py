"""The monitors write a sample per minute, and report the processes of their hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings, load
from dispatcher.errors import StoreUnavailable
from dispatcher.host.process_table import ProcessTable
from dispatcher.monitor.samples import SAMPLE_SECONDS, HostReporting, MinuteSampling
from dispatcher.store.alerts import AlertStore
from dispatcher.store.connections import Pool, make_pool
from dispatcher.store.retention import Retention
from dispatcher.store.samples import QueueDepth, list_samples
from tests.monitor.hosts import Depth, RecordingChannel, host
from tests.store.books import Books
from tests.store.test_outgoing_events import disk_full


@pytest.fixture
def settings(tables_url: str) -> Settings:
    """The settings of a host with two lanes."""
    return load(
        {
            "DISPATCHER_DATABASE_URL": tables_url,
            "DISPATCHER_AMQP_URL": "amqp://unused.invalid",
            "DISPATCHER_QUEUE": "send",
            "DISPATCHER_DLQ": "dead",
            "DISPATCHER_LANES": "normal,bulk",
        }
    )


@pytest.fixture
async def monitor_pool(tables_url: str) -> AsyncIterator[Pool]:
    """A monitor's session pool."""
    opened = make_pool(tables_url, name="monitor", size=1)
    await opened.open()
    yield opened
    await opened.close()


async def test_a_sample_has_the_queues_by_lane_and_the_counts_by_status(
    settings: Settings, monitor_pool: Pool, books: Books
) -> None:
    books.enqueue(3)
    queues = {"send": FoundQueue(5, 2), "send.bulk": FoundQueue(6, 2), "dead": FoundQueue(7, 0)}

    seconds = await MinuteSampling(monitor_pool, settings, lambda: queues).run_once()
    await MinuteSampling(monitor_pool, settings, lambda: None).run_once()  # another host, a moment later

    (sample,) = await list_samples(monitor_pool, 60)
    assert sample.emails["pending"] == 3
    assert sample.queues == {"normal": QueueDepth(5, 2), "bulk": QueueDepth(6, 2), "dlq": QueueDepth(7, 0)}
    assert sample.oldest_pending_seconds is not None
    assert seconds == SAMPLE_SECONDS


async def test_without_rabbitmq_a_sample_has_no_queues(settings: Settings, monitor_pool: Pool) -> None:
    await MinuteSampling(monitor_pool, settings, lambda: None).run_once()

    (sample,) = await list_samples(monitor_pool, 60)
    assert sample.queues is None


async def test_a_monitor_reports_its_hosts_processes_until_it_stops_in_an_orderly_way(
    tables_url: str, monitor_pool: Pool, books: Books
) -> None:
    table = ProcessTable(["worker", "relay"])
    slot = table.take_slot("worker", 3)
    slot.begin()
    slot.note_process(4711)
    slot.mark_up()
    slot.note_restart()

    await HostReporting(monitor_pool, table.statuses, slot.commit, holder="host-1:x", host="host-1").run_once()
    (row,) = books.select("select * from host_presence")
    store = AlertStore(
        tables_url, queue="dead", holder="host-1:x", host="host-1", retention=Retention(0, 0, 0), idle_seconds=60
    )
    await store.leave()

    (process,) = row["processes"]
    assert (process["role"], process["number"], process["pid"], process["is_up"]) == ("worker", 3, 4711, True)
    assert process["restarts"] == 1
    assert row["version"]
    assert books.count("host_presence") == 0


async def test_a_monitor_waits_for_a_commit_while_postgresql_can_be_read_but_not_written(
    monitor_pool: Pool, books: Books
) -> None:
    table = ProcessTable(["monitor"])
    slot = table.take_slot("monitor", 0)
    reporting = HostReporting(monitor_pool, table.statuses, slot.commit, holder="host-1:x", host="host-1")
    waits: list[float] = []
    with disk_full(books.connection, "insert or update on host_presence"):
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await reporting.run_once()
            waits += [each.commit_wait_seconds for each in table.statuses() if each.commit_wait_seconds is not None]
    assert len(waits) == 2
    assert waits[1] >= waits[0]

    await reporting.run_once()

    assert table.statuses()[0].commit_wait_seconds is None


async def test_a_check_leaves_its_result_and_the_active_alerts_for_the_page(tables_url: str, books: Books) -> None:
    depth = Depth(3)
    async with host(tables_url, depth, RecordingChannel()) as monitor:
        await monitor.check()
        (found,) = books.select("select * from alert_check")
        depth.messages = None
        await monitor.check()
        (blind,) = books.select("select * from alert_check")
        depth.messages = 0
        await monitor.check()
        (calm,) = books.select("select * from alert_check")

    assert (found["host"], found["depth"], found["fault"]) == ("host-1", 3, None)
    assert [(alert["kind"], alert["count"]) for alert in found["alerts"]] == [("dead_letters", 3)]
    assert (blind["depth"], "503" in blind["fault"], "ann@" in blind["fault"]) == (None, True, False)
    assert (calm["depth"], calm["fault"], calm["alerts"]) == (0, None, [])
