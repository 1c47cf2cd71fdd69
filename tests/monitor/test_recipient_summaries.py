"""Look-ups by recipient read few pages, whatever became of the summaries in the index."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg
import pytest
from psycopg import errors as pg
from structlog.testing import capture_logs

from dispatcher.monitor.upkeep import RecipientSummaries
from dispatcher.store.connections import connect_async
from dispatcher.store.named_locks import named_lock

RANGE_PAGES: Final = 16
INDEX: Final = "email_recipient_default_email_id_address_hash_domain_idx"


def forget_summaries(connection: psycopg.Connection) -> None:
    """Removes the summaries of two of three ranges, as if autovacuum had lost the requests for them."""
    connection.execute(
        "select brin_desummarize_range(%s, page) from generate_series(0, %s, %s) as page",
        [INDEX, 2 * pages(connection) // 3, RANGE_PAGES],
    )


def leave_a_summary_unfinished(connection: psycopg.Connection) -> None:
    """Cancels the summarising of one of the first ranges, and then summarises the others."""
    for milliseconds in range(1, 50):  # on a busy machine, the statement may be cancelled before it begins a range
        forget_summaries(connection)
        connection.execute(f"set statement_timeout = {milliseconds}".encode())
        with suppress(pg.QueryCanceled):
            connection.execute("select brin_summarize_new_values(%s)", [INDEX])
        connection.execute("set statement_timeout = 0")
        connection.execute("select brin_summarize_new_values(%s)", [INDEX])
        if pages_read(connection) > pages(connection) / 2:
            return
    raise AssertionError("no cancelled statement left an unfinished summary")


def pages(connection: psycopg.Connection) -> int:
    row = connection.execute(
        "select pg_relation_size('email_recipient_default') / current_setting('block_size')::integer"
    ).fetchone()
    assert row is not None
    return int(row[0])


def pages_read(connection: psycopg.Connection, partition: str = "email_recipient_default") -> int:
    """How many pages of a partition a look-up of an unknown recipient reads."""
    connection.execute("set enable_seqscan = off")
    row = connection.execute(
        f"explain (analyze, format json) select from {partition} "
        "where address_hash = '\\x010203040506' and domain = 'unknown.example'".encode()
    ).fetchone()
    assert row is not None
    return int(row[0][0]["Plan"].get("Lossy Heap Blocks", 0))


@pytest.fixture
def recipients(connection: psycopg.Connection) -> psycopg.Connection:
    """A separate database with 100,000 recipients, all summarised except for the last pages."""
    connection.execute(f"alter index {INDEX} set (autosummarize = off)".encode())
    # Autovacuum would come because of the inserted rows, and summarise between two steps of a test.
    connection.execute("alter table email_recipient_default set (autovacuum_enabled = off)")
    connection.execute(
        "insert into email_recipient (email_id, address_hash, domain) "
        "select lpad(to_hex(n), 32, '0')::uuid, substring(sha256(n::text::bytea) from 1 for 6), 'd' || n || '.example' "
        "from generate_series(1, 100000) as n"
    )
    connection.execute(
        "select brin_summarize_range(%s, page) from generate_series(0, %s, %s) as page",
        [INDEX, pages(connection) - RANGE_PAGES, RANGE_PAGES],
    )
    assert pages_read(connection) < 3 * RANGE_PAGES
    return connection


@pytest.mark.parametrize("break_summaries", [forget_summaries, leave_a_summary_unfinished])
async def test_missing_and_unfinished_summaries_are_created_again(
    recipients: psycopg.Connection, database_url: str, break_summaries: Callable[[psycopg.Connection], None]
) -> None:
    break_summaries(recipients)
    assert pages_read(recipients) > pages(recipients) / 2

    with capture_logs() as logs:
        await RecipientSummaries(database_url).run_once()
        await RecipientSummaries(database_url).run_once()

    assert pages_read(recipients) < 3 * RANGE_PAGES
    assert [(log["event"], log["names"]) for log in logs] == [("partition.summarized", ["email_recipient_default"])]


async def test_a_partition_under_vacuum_is_left_for_the_next_round(
    recipients: psycopg.Connection, database_url: str
) -> None:
    forget_summaries(recipients)

    with psycopg.connect(database_url) as vacuum, capture_logs() as logs:
        vacuum.execute("lock table email_recipient_default in share update exclusive mode")
        await RecipientSummaries(database_url).run_once()

    assert logs == []
    assert pages_read(recipients) > pages(recipients) / 2
    await RecipientSummaries(database_url).run_once()
    assert pages_read(recipients) < 3 * RANGE_PAGES


def test_the_last_pages_of_a_new_partition_have_no_summary_that_an_enqueue_would_write_again(
    connection: psycopg.Connection,
) -> None:
    far = datetime(2040, 1, 2, tzinfo=UTC)
    add = (
        "insert into email_recipient (email_id, address_hash, domain) "
        "values (email_id_lowest_at(%s), '\\xaabbccddeeff', 'example.org')"
    )
    for week in (0, 1):
        connection.execute(add, [far + timedelta(weeks=week)])
    assert pages_read(connection) == 1  # both are in the default partition

    connection.execute("select email_partitions_make(%s, 0)", [far])

    assert pages_read(connection, "email_recipient_p20400102") == 1
    connection.execute(add, [far + timedelta(hours=1)])
    assert pages_read(connection, "email_recipient_p20400102") == 1


async def test_one_host_at_a_time_checks_the_summaries(recipients: psycopg.Connection, database_url: str) -> None:
    forget_summaries(recipients)

    async with (
        await connect_async(database_url, name="other host") as other,
        named_lock(other, RecipientSummaries.lock_name) as is_its,
    ):
        assert is_its
        await RecipientSummaries(database_url).run_once()

    assert pages_read(recipients) > pages(recipients) / 2


def test_other_tables_are_not_touched(recipients: psycopg.Connection) -> None:
    for name in ("email_log_default", "pg_class", "missing", "email_recipient; drop table email_log"):
        row = recipients.execute("select email_recipient_summarize(%s)", [name]).fetchone()
        assert row == (False,)
