"""Samples per minute: their differences are the emails of a minute, and several monitors write one."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from dispatcher.store import samples
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.figures import MonitorCounts, count_for_monitor, sum_attempts
from dispatcher.store.samples import QueueDepth, list_samples, save_sample
from tests.store.books import Books

HOUR = timedelta(hours=1)
QUEUES = {"normal": QueueDepth(7, 2), "dlq": QueueDepth(1, 0)}


def count_attempts(books: Books, at: datetime, emails: int, outcome: str = "accepted", provider: str = "smtp") -> None:
    """Counts attempts in the hour of an instant."""
    books.connection.execute(
        "insert into email_hourly as h values (date_trunc('hour', %s::timestamptz, 'UTC'), %s, %s, 'slot', %s) "
        "on conflict (hour, provider, outcome, slot) do update set email_count = h.email_count + excluded.email_count",
        [at, provider, outcome, emails],
    )


async def sample(session: AsyncSession, every_seconds: float = 0.0) -> int | None:
    return await save_sample(session, QUEUES, every_seconds=every_seconds)


async def test_attempts_are_added_up_over_the_hours_without_reading_old_hours(tables_url: str, books: Books) -> None:
    now = datetime.now(UTC)
    count_attempts(books, now - 50 * HOUR, 1_000_000)
    async with await connect_async(tables_url, name="monitor") as session:
        count_attempts(books, now, 5)
        await sample(session)
        count_attempts(books, now, 3)
        count_attempts(books, now, 2, "rejected")
        # The monitors did not run for three hours, but workers did.
        books.connection.execute(
            "update minute_sample set minute = minute - interval '3 hours',"
            " counted_since = counted_since - interval '3 hours'"
        )
        count_attempts(books, now - 2 * HOUR, 10)
        await sample(session)
        later = await list_samples(session, 300)

    first, last = (each.attempts for each in later)
    assert last["accepted"] - first["accepted"] == 13
    assert last["rejected"] == 2


async def test_a_minute_has_one_sample_and_the_newest_replaces_it(tables_url: str, books: Books) -> None:
    async with await connect_async(tables_url, name="monitor") as session:
        await sample(session)
        books.connection.execute("update minute_sample set minute = date_trunc('minute', now())")
        books.enqueue(2)
        await sample(session)
        (found,) = await list_samples(session, 60)

    assert found.emails["pending"] == 2
    assert found.queues == QUEUES
    assert 0 <= found.age_seconds < 60


async def test_only_the_first_of_several_monitors_writes_a_sample(tables_url: str, books: Books) -> None:
    async with (
        await connect_async(tables_url, name="monitor 1") as one,
        await connect_async(tables_url, name="monitor 2") as two,
    ):
        stored = await asyncio.gather(sample(one, 60.0), sample(two, 60.0))

    assert [each for each in stored if each is not None] == [0]
    assert books.count("minute_sample") == 1


async def test_a_cancelled_email_is_counted_once_a_minute_later(
    tables_url: str, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        await connect_async(tables_url, name="monitor 1") as one,
        await connect_async(tables_url, name="monitor 2") as two,
    ):
        await sample(one)
        books.connection.execute("update minute_sample set taken_at = now() - interval '1 minute'")
        books.connection.execute(
            "insert into operator_audit (acted_at, actor, action) select now() - age, actor, action"
            " from (values (interval '130 s', 'ann', 'cancel'), ('90 s', 'ann', 'cancel'), ('30 s', 'ann', 'cancel'),"
            " ('90 s', 'expiry', 'cancel'), ('90 s', 'ann', 'reschedule')) as acts (age, actor, action)"
        )
        counted = []

        async def count_for_long(session: AsyncSession) -> MonitorCounts:
            if session is two:
                counted.append(await sample(one))
            return await count_for_monitor(session)

        monkeypatch.setattr(samples, "count_for_monitor", count_for_long)

        assert (await sample(two), counted) == (0, [1])


async def test_samples_are_kept_for_three_days(tables_url: str, books: Books) -> None:
    async with await connect_async(tables_url, name="monitor") as session:
        await sample(session)
        books.connection.execute(
            "insert into minute_sample select minute - interval '73 hours', taken_at, emails, oldest_pending_seconds,"
            " longest_due_seconds, queues, attempts, counted_since, counted from minute_sample"
        )
        assert await sample(session) is not None

    assert books.count("minute_sample") == 1


@pytest.mark.parametrize(("unit", "seconds", "expected"), [("hour", 7200, 3), ("day", 2 * 86400, 3)])
async def test_attempts_are_summed_by_hour_or_day_with_the_first_whole(
    tables_url: str, books: Books, unit: str, seconds: float, expected: int
) -> None:
    now = datetime.now(UTC)
    step = HOUR if unit == "hour" else 24 * HOUR
    for ago in range(5):
        count_attempts(books, now - ago * step, 1)
    async with await connect_async(tables_url, name="reader") as session:
        found = await sum_attempts(session, unit, seconds)

    assert [(each.provider, each.outcome, each.emails) for each in found] == [("smtp", "accepted", 1)] * expected
