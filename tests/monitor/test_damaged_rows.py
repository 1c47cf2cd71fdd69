"""A monitor counts and checks all emails beside damaged rows."""

from __future__ import annotations

import pytest

from dispatcher.store.alerts import AlertStore
from dispatcher.store.connections import connect_async
from dispatcher.store.figures import count_for_monitor, list_workers, measure_latency
from dispatcher.store.retention import Retention
from tests.store.books import Books
from tests.store.damaged_rows import insert_damaged


@pytest.fixture
def damaged(books: Books) -> Books:
    insert_damaged(books)
    return books


async def test_the_facts_for_alerts_are_read(tables_url: str, damaged: Books) -> None:
    retention = Retention(30, 400, 0, 0, 180)
    store = AlertStore(tables_url, queue="dead", holder="a:1", host="a", retention=retention, idle_seconds=60)
    damaged.enqueue_one()

    found = await store.find()
    await store.leave()

    assert found.due > 0


async def test_the_counts_of_metrics_are_read(tables_url: str, damaged: Books) -> None:
    other = damaged.enqueue_one()
    damaged.connection.execute(
        "update email_log set created_at = now() - interval '1 day' where email_id = %s", [other]
    )

    async with await connect_async(tables_url, name="test monitor") as session:
        counts = await count_for_monitor(session)
        await measure_latency(session)
        workers = await list_workers(session)

    assert counts.oldest_pending_seconds is not None
    assert counts.longest_due_seconds is not None
    assert [worker.name for worker in workers] == ["gone:w1:1:a"]
