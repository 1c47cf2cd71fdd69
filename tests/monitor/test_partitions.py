"""Tests the relay's service that creates partitions. tests/store/test_partitions.py tests the partitions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest
from structlog.testing import capture_logs

from dispatcher.monitor.upkeep import Partitions
from dispatcher.store.connections import Pool, connect_async, make_pool
from dispatcher.store.named_locks import named_lock


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    """A relay's session pool for a separate database."""
    opened = make_pool(database_url, name="relay", size=1)
    await opened.open()
    yield opened
    await opened.close()


async def test_one_relay_at_a_time_creates_the_missing_partitions(
    connection: psycopg.Connection, database_url: str, pool: Pool
) -> None:
    await Partitions(pool).run_once()  # a week may have ended since the tables were created
    row = connection.execute(
        "select max(inhrelid::regclass::text) from pg_inherits where inhparent = 'email_log'::regclass"
    ).fetchone()
    assert row is not None
    connection.execute(f"drop table {row[0]}".encode())

    with capture_logs() as logs:
        async with (
            await connect_async(database_url, name="other relay") as other,
            named_lock(other, Partitions.lock_name) as is_its,
        ):
            assert is_its
            await Partitions(pool).run_once()
        assert logs == []
        await Partitions(pool).run_once()

    assert [(log["event"], log["names"]) for log in logs] == [("partition.created", [row[0]])]
