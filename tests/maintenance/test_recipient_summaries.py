"""Look-ups by recipient read few pages, whatever became of the summaries in the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import psycopg
import pytest
from psycopg import errors as pg
from structlog.testing import capture_logs

from dispatcher.maintenance.recipient_summaries import LOCK_NAME, RecipientSummaries
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
    """Cancels the summarising of the first ranges, and then summarises the others."""
    forget_summaries(connection)
    connection.execute("set statement_timeout = '1ms'")
    with pytest.raises(pg.QueryCanceled):
        connection.execute("select brin_summarize_new_values(%s)", [INDEX])
    connection.execute("set statement_timeout = 0")
    connection.execute("select brin_summarize_new_values(%s)", [INDEX])


def pages(connection: psycopg.Connection) -> int:
    row = connection.execute(
        "select pg_relation_size('email_recipient_default') / current_setting('block_size')::integer"
    ).fetchone()
    assert row is not None
    return int(row[0])


def pages_read(connection: psycopg.Connection) -> int:
    """How many pages a look-up of an unknown recipient reads."""
    connection.execute("set enable_seqscan = off")
    row = connection.execute(
        "explain (analyze, format json) select from email_recipient_default "
        "where address_hash = '\\x010203040506' and domain = 'unknown.example'"
    ).fetchone()
    assert row is not None
    return int(row[0][0]["Plan"].get("Lossy Heap Blocks", 0))


@pytest.fixture
def recipients(connection: psycopg.Connection) -> psycopg.Connection:
    """A separate database with 100,000 recipients, all summarised except for the last pages."""
    connection.execute(f"alter index {INDEX} set (autosummarize = off)".encode())
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


async def test_one_host_at_a_time_checks_the_summaries(recipients: psycopg.Connection, database_url: str) -> None:
    forget_summaries(recipients)

    async with await connect_async(database_url, name="other host") as other, named_lock(other, LOCK_NAME) as is_its:
        assert is_its
        await RecipientSummaries(database_url).run_once()

    assert pages_read(recipients) > pages(recipients) / 2


def test_other_tables_are_not_touched(recipients: psycopg.Connection) -> None:
    for name in ("email_log_default", "pg_class", "missing", "email_recipient; drop table email_log"):
        row = recipients.execute("select email_recipient_summarize(%s)", [name]).fetchone()
        assert row == (False,)
