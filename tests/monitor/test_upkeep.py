"""Tests the monitor's upkeep: pruning, partitions, and the summaries of the index of recipients. tests/store tests
which rows and partitions the statements choose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
import pytest
from structlog.testing import capture_logs

from dispatcher.monitor.upkeep import (
    BUSY_SECONDS,
    LOCK_WAIT_SECONDS,
    PRUNE_SECONDS,
    OneTimeCodePruning,
    Partitions,
    PruningService,
    RecipientSummaries,
)
from dispatcher.store.connections import connect_async
from dispatcher.store.named_locks import named_lock
from dispatcher.store.retention import LOCK_NAME, Retention
from tests.store.books import Books

RETENTION: Final = Retention(30, 60, 90, 90)
RANGE_PAGES: Final = 16
INDEX: Final = "email_recipient_default_email_id_address_hash_domain_idx"


@pytest.fixture
def books(connection: psycopg.Connection) -> Books:
    """A separate database with an old partition of each weekly table, and an old audit record."""
    connection.execute("select email_partitions_make(clock_timestamp() - interval '100 days', 0)")
    connection.execute(
        "insert into operator_audit (acted_at, actor, action) "
        "values (clock_timestamp() - interval '100 days', 'ann', 'stop')"
    )
    return Books(connection)


def value_of(connection: psycopg.Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


@asynccontextmanager
async def holding(database_url: str, lock_name: str) -> AsyncIterator[None]:
    async with await connect_async(database_url, name="other host") as other, named_lock(other, lock_name) as is_ours:
        assert is_ours
        yield


async def test_a_failed_part_is_logged_and_retried_and_the_others_are_done(books: Books, database_url: str) -> None:
    oldest = "select min(partition) from email_partitions_ended('email_content', clock_timestamp())"
    stuck = value_of(books.connection, oldest)
    books.connection.execute(f"create view report as table {stuck}".encode())

    with capture_logs() as logs:
        seconds = await PruningService(database_url, RETENTION).run_once()

    assert seconds == PRUNE_SECONDS
    (told,) = [line for line in logs if line["event"] == "emails.pruning_failed"]
    assert (told["what"], told["retry_in_seconds"]) == ("email_content", PRUNE_SECONDS)
    (done,) = [line for line in logs if line["event"] == "emails.pruned"]
    week = stuck.rpartition("_")[2]
    dropped = ("email_attachment", "email_attempt", "email_event", "email_recipient")
    assert (done["act_count"], done["partitions"]) == (1, [f"{table}_{week}" for table in dropped])


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
    books.change(books.enqueue_one(tags=["one_time_code"]), status="sent")
    async with holding(database_url, LOCK_NAME):
        assert await PruningService(database_url, RETENTION).run_once() == LOCK_WAIT_SECONDS
        await OneTimeCodePruning(database_url, RETENTION).run_once()

    assert books.count("email_content") == 0


async def test_one_relay_at_a_time_adds_missing_partitions(connection: psycopg.Connection, database_url: str) -> None:
    await Partitions(database_url).run_once()  # a week may have ended since the tables were created
    last = value_of(
        connection, "select max(inhrelid::regclass::text) from pg_inherits where inhparent = 'email_log'::regclass"
    )
    connection.execute(f"drop table {last}".encode())

    with capture_logs() as logs:
        async with holding(database_url, Partitions.lock_name):
            await Partitions(database_url).run_once()
        assert logs == []
        await Partitions(database_url).run_once()

    assert [(log["event"], log["names"]) for log in logs] == [("partition.created", [last])]


def forget_summaries(connection: psycopg.Connection) -> None:
    connection.execute(
        "select brin_desummarize_range(%s, page) from generate_series(0, %s, %s) as page",
        [INDEX, 2 * pages(connection) // 3, RANGE_PAGES],
    )


def pages(connection: psycopg.Connection) -> int:
    size = "pg_relation_size('email_recipient_default') / current_setting('block_size')::integer"
    return int(value_of(connection, f"select {size}"))


def pages_read(connection: psycopg.Connection, partition: str = "email_recipient_default") -> int:
    """How many pages of a partition a look-up of an unknown recipient reads."""
    connection.execute("set enable_seqscan = off")
    look_up = f"select from {partition} where address_hash = '\\x010203040506' and domain = 'unknown.example'"
    plan = value_of(connection, f"explain (analyze, format json) {look_up}")
    return int(plan[0]["Plan"].get("Lossy Heap Blocks", 0))


@pytest.fixture
def recipients(connection: psycopg.Connection) -> psycopg.Connection:
    """A separate database with 100,000 recipients, all summarised except for the last pages."""
    connection.execute(f"alter index {INDEX} set (autosummarize = off)".encode())
    # Autovacuum would come because of the inserted rows, and summarise between two steps of a test.
    connection.execute("alter table email_recipient_default set (autovacuum_enabled = off)")
    connection.execute(
        "insert into email_recipient (email_id, address_hash, domain) "
        "select lpad(to_hex(n), 32, '0')::uuid, substring(sha256(n::text::bytea) from 1 for 6), "
        "'d' || n || '.example' from generate_series(1, 100000) as n"
    )
    connection.execute(
        "select brin_summarize_range(%s, page) from generate_series(0, %s, %s) as page",
        [INDEX, pages(connection) - RANGE_PAGES, RANGE_PAGES],
    )
    assert pages_read(connection) < 3 * RANGE_PAGES
    return connection


async def test_missing_summaries_are_created_again(recipients: psycopg.Connection, database_url: str) -> None:
    forget_summaries(recipients)
    assert pages_read(recipients) > pages(recipients) / 2

    with capture_logs() as logs:
        await RecipientSummaries(database_url).run_once()
        await RecipientSummaries(database_url).run_once()

    assert pages_read(recipients) < 3 * RANGE_PAGES
    assert [(log["event"], log["names"]) for log in logs] == [("partition.summarized", ["email_recipient_default"])]


@pytest.mark.parametrize("name", ["email_log_default", "pg_class", "missing", "email_recipient; drop table email_log"])
def test_other_tables_are_not_touched(connection: psycopg.Connection, name: str) -> None:
    assert connection.execute("select email_recipient_summarize(%s)", [name]).fetchone() == (False,)
