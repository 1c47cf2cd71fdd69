"""Partition pruning: with any plan, a statement that takes email ids reads only the partitions of the ids' weeks.

PostgreSQL counts index and table scans by partition. These counts show which partitions were read.
"""

from __future__ import annotations

import re
from datetime import timedelta
from uuid import UUID

import psycopg
import pytest

from dispatcher.domain.email_id import time_of
from dispatcher.domain.status import Status
from dispatcher.store.connections import make_pool
from dispatcher.store.leases import LeaseStore
from tests.store.books import Books
from tests.store.results import result
from tests.waiting import wait_until

RUNS = 12
"""PostgreSQL plans a prepared statement five times, then may keep one plan for all values. psycopg prepares a
statement at its sixth execution."""


def weeks(email_ids: list[UUID]) -> set[str]:
    days = {time_of(email_id).date() for email_id in email_ids}
    return {f"p{day - timedelta(days=day.weekday()):%Y%m%d}" for day in days}


def scanned(database_url: str) -> set[str]:
    """The suffixes of the partitions that were scanned since the statistics were reset."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        wait_until(lambda: not Books(connection).sessions("planned"))
        rows = connection.execute(
            "select relname from pg_stat_user_tables where coalesce(seq_scan, 0) + coalesce(idx_scan, 0) > 0"
        ).fetchall()
    return {match[1] for (name,) in rows if (match := re.fullmatch(r"email_[a-z]+_(p\d{8}|default)", name))}


@pytest.mark.parametrize("plans", ["auto", "force_generic_plan", "force_custom_plan"])
async def test_the_workers_statements_scan_only_the_partitions_of_their_emails(database_url: str, plans: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        books = Books(connection)
        email_ids = books.enqueue(5 * RUNS, attachments=[])
        connection.execute(f"alter database {connection.info.dbname} set plan_cache_mode = {plans}".encode())
        keys = books.keys(email_ids)
    with psycopg.connect(database_url, autocommit=True) as connection:  # a session reports its counters when it ends
        wait_until(lambda: not Books(connection).other_sessions())
        connection.execute("select pg_stat_reset()")
    pool = make_pool(database_url, name="planned", size=1)
    await pool.open()
    store = LeaseStore(pool, worker="planned", slot="slot-1")

    for first in range(0, len(email_ids), 5):
        batch = email_ids[first : first + 5]
        leases = await store.lease({email_id: keys[email_id] for email_id in batch}, 60)
        tokens = {lease.email_id: lease.token for lease in leases}
        assert len(tokens) == 5
        await store.renew(tokens, 60)
        await store.find_unleased(batch)
        await store.release_unanswered(batch[:1])
        await store.release({batch[1]: tokens[batch[1]]})
        results = [result(lease, Status.SENT) for lease in leases if lease.email_id in batch[2:]]
        assert len(await store.record(results)) == 3
        assert await store.is_recorded(results[0])
    await pool.close()

    assert scanned(database_url) == weeks(email_ids)
