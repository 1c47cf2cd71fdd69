"""Counts and ages: a waiting email is not due, so it is not old, and other statements do not read it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.domain.status import Status
from dispatcher.store.connections import connect_async
from dispatcher.store.figures import MonitorCounts, count_emails, count_for_monitor, measure_latency
from dispatcher.store.queries import query
from tests.store.books import Books

HOUR = timedelta(hours=1)
WAITING = 3_000


async def counts(tables_url: str) -> MonitorCounts:
    async with await connect_async(tables_url, name="monitor") as session:
        return await count_for_monitor(session)


async def test_waiting_and_cancelled_emails_are_counted_and_not_pending(tables_url: str, books: Books) -> None:
    waiting, cancelled = books.enqueue(2)
    now = datetime.now(UTC)
    books.change(waiting, status="waiting", wait_until=now + HOUR, publish_due_at=None, created_at=now - 50 * HOUR)
    books.change(cancelled, status="cancelled", publish_due_at=None, created_at=now - 50 * HOUR)

    found = await counts(tables_url)

    exact = count_emails.sync(books.connection)
    assert (found.emails[Status.WAITING], found.emails[Status.PENDING]) == (1, 0)
    assert (exact[Status.WAITING], exact[Status.CANCELLED], exact[Status.PENDING]) == (1, 1, 0)
    assert (found.oldest_pending_seconds, found.longest_due_seconds) == (None, None)


async def test_a_scheduled_email_that_has_become_pending_is_as_old_as_its_schedule(
    tables_url: str, books: Books
) -> None:
    scheduled, usual = books.enqueue(2)
    now = datetime.now(UTC)
    books.change(scheduled, created_at=now - 50 * HOUR, due_since=now - HOUR / 2)
    recent = (await counts(tables_url)).oldest_pending_seconds
    books.change(usual, created_at=now - HOUR)
    older = (await counts(tables_url)).oldest_pending_seconds

    assert recent == pytest.approx(1800, abs=60)
    assert older == pytest.approx(3600, abs=60)


async def test_latency_of_a_scheduled_email_counts_from_its_schedule(tables_url: str, books: Books) -> None:
    email_id = books.enqueue_one()
    now = datetime.now(UTC)
    books.change(email_id, status="sent", created_at=now - HOUR, due_since=now - timedelta(seconds=2), sent_at=now)

    latency = measure_latency.sync(books.connection)

    assert latency is not None
    assert latency.p99_seconds == pytest.approx(2, abs=0.01)


def rows_read(plan: dict[str, Any]) -> Iterator[int]:
    """The rows that each scan of a table or index read."""
    for child in plan.get("Plans", []):
        yield from rows_read(child)
    if "Relation Name" in plan:
        yield plan["Actual Loops"] * (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("find_oldest_pending", {"limit": 100_000}),
        ("find_flow", {"limit": 100}),
        ("find_lost_messages", {"age_seconds": 60, "ahead_seconds": 90}),
        ("find_oldest_dead_letters", {"limit": 100}),
        ("list_workers", {}),
    ],
)
def test_what_the_monitor_repeats_reads_no_waiting_email(
    connection: psycopg.Connection, name: str, parameters: dict[str, Any]
) -> None:
    books = Books(connection)
    books.enqueue(WAITING)
    connection.execute(
        "update email_log set status = 'waiting', publish_due_at = null, wait_until = now() + interval '1 week'"
    )
    books.enqueue(3)
    connection.execute("vacuum analyze email_log")

    rows = connection.execute(b"explain (analyze, format json) " + query(name), parameters).fetchone()

    assert rows is not None
    assert sum(rows_read(rows[0][0]["Plan"])) < WAITING // 10
