"""Tests the monitor's pruning services. tests/store/test_retention.py tests which rows are deleted."""

from __future__ import annotations

import psycopg
import pytest
from structlog.testing import capture_logs

from dispatcher.monitor.upkeep import (
    BUSY_SECONDS,
    LOCK_WAIT_SECONDS,
    PRUNE_SECONDS,
    OneTimeCodePruning,
    PruningService,
)
from dispatcher.store.connections import connect_async, make_pool
from dispatcher.store.named_locks import named_lock
from dispatcher.store.retention import LOCK_NAME, Retention
from tests.store.books import Books

RETENTION = Retention(30, 60, 90, 90)


@pytest.fixture
def books(connection: psycopg.Connection) -> Books:
    """A separate database with an old partition of each weekly table, and an old audit record."""
    connection.execute("select email_partitions_make(clock_timestamp() - interval '100 days', 0)")
    connection.execute(
        "insert into operator_audit (acted_at, actor, action) "
        "values (clock_timestamp() - interval '100 days', 'ann', 'stop')"
    )
    return Books(connection)


def old_partition(books: Books, table: str) -> str:
    (row,) = books.select(f"select min(partition) as name from email_partitions_ended('{table}', clock_timestamp())")  # noqa: S608
    return str(row["name"])


async def test_a_failed_part_is_logged_and_retried_and_the_others_are_done(books: Books, database_url: str) -> None:
    stuck = old_partition(books, "email_content")
    books.connection.execute(f"create view report as table {stuck}".encode())

    with capture_logs() as logs:
        seconds = await PruningService(database_url, RETENTION).run_once()

    assert seconds == PRUNE_SECONDS
    (told,) = [line for line in logs if line["event"] == "emails.pruning_failed"]
    assert (told["what"], told["retry_in_seconds"]) == ("email_content", PRUNE_SECONDS)
    (done,) = [line for line in logs if line["event"] == "emails.pruned"]
    assert done["act_count"] == 1
    dropped = ("email_attachment", "email_attempt", "email_event", "email_recipient")
    assert done["partitions"] == [old_partition_name(stuck, table) for table in dropped]


def old_partition_name(name: str, table: str) -> str:
    """The name of this table's partition for the same week as the partition `name`."""
    return f"{table}_{name.rpartition('_')[2]}"


async def test_a_locked_partition_is_retried_soon_and_the_others_are_dropped(books: Books, database_url: str) -> None:
    with capture_logs() as logs, psycopg.connect(database_url) as reader:
        reader.execute("select from email_content")
        seconds = await PruningService(database_url, RETENTION).run_once()

    assert seconds == BUSY_SECONDS
    assert [line["event"] for line in logs] == ["emails.pruning_postponed", "emails.pruned"]
    assert books.count("operator_audit") == 0


async def test_an_unreachable_postgresql_is_retried_soon() -> None:
    with capture_logs() as logs:
        seconds = await PruningService("postgresql://nobody@127.0.0.1:1/x", RETENTION).run_once()

    assert seconds == BUSY_SECONDS
    assert [line["event"] for line in logs] == ["store.connection_lost"]


async def test_one_time_codes_are_deleted_while_another_session_prunes(books: Books, database_url: str) -> None:
    email_id = books.enqueue_one(tags=["one_time_code"])
    books.change(email_id, status="sent")
    pool = make_pool(database_url, name="monitor", size=1)
    await pool.open()
    async with await connect_async(database_url, name="other host") as other, named_lock(other, LOCK_NAME) as is_its:
        assert is_its

        assert await PruningService(database_url, RETENTION).run_once() == LOCK_WAIT_SECONDS
        await OneTimeCodePruning(pool, RETENTION).run_once()

    await pool.close()
    assert books.count("email_content") == 0
