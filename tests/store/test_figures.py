"""What the monitor and the checks read: counts, ages, samples per minute, and old transactions.

A waiting email is not due, so it is not old, and the statements that the monitor repeats do not read it. The
differences of samples are the emails of a minute, and several monitors write one.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.cli.checks import CheckState, old_transaction_finding
from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession, connect_async, connected
from dispatcher.store.figures import count_emails, count_for_monitor, measure_latency, measure_paces, sum_attempts
from dispatcher.store.old_transactions import OldTransaction, find_oldest_transaction
from dispatcher.store.samples import QueueDepth, list_samples, save_sample
from tests.store.books import Books

HOUR = timedelta(hours=1)
QUEUES = {"normal": QueueDepth(7, 2), "dlq": QueueDepth(1, 0)}


def count_attempts(books: Books, at: datetime, emails: int, outcome: str = "accepted", provider: str = "smtp") -> None:
    books.connection.execute(
        "insert into email_hourly as h values (date_trunc('hour', %s::timestamptz, 'UTC'), %s, %s, 'slot', %s) "
        "on conflict (hour, provider, outcome, slot) do update set email_count = h.email_count + excluded.email_count",
        [at, provider, outcome, emails],
    )


async def sample(session: AsyncSession, every_seconds: float = 0.0) -> int | None:
    return await save_sample(session, QUEUES, every_seconds=every_seconds)


async def test_attempts_are_added_up_over_hours_without_reading_old_ones(session: AsyncSession, books: Books) -> None:
    now = datetime.now(UTC)
    count_attempts(books, now - 50 * HOUR, 1_000_000)
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


async def test_a_minute_has_one_sample_that_the_newest_replaces_for_3_days(session: AsyncSession, books: Books) -> None:
    await sample(session)
    books.connection.execute("update minute_sample set minute = date_trunc('minute', now())")
    books.connection.execute(
        "insert into minute_sample select minute - interval '73 hours', taken_at, emails, oldest_pending_seconds,"
        " longest_due_seconds, queues, attempts, counted_since, counted from minute_sample"
    )
    books.enqueue(2)
    await sample(session)
    (found,) = await list_samples(session, 60)

    assert books.count("minute_sample") == 1
    assert found.emails["pending"] == 2
    assert found.queues == QUEUES
    assert 0 <= found.age_seconds < 60


async def test_only_the_first_monitor_writes_a_sample(session: AsyncSession, books: Books, tables_url: str) -> None:
    async with await connect_async(tables_url, name="monitor 2") as other:
        stored = await asyncio.gather(sample(session, 60.0), sample(other, 60.0))

    assert [each for each in stored if each is not None] == [0]
    assert books.count("minute_sample") == 1


async def test_a_cancelled_email_is_counted_once_a_minute_later(session: AsyncSession, books: Books) -> None:
    await sample(session)
    books.connection.execute("update minute_sample set taken_at = now() - interval '1 minute'")
    books.connection.execute(
        "insert into operator_audit (acted_at, actor, action) select now() - age, actor, action"
        " from (values (interval '130 s', 'ann', 'cancel'), ('90 s', 'ann', 'cancel'), ('30 s', 'ann', 'cancel'),"
        " ('90 s', 'expiry', 'cancel'), ('90 s', 'ann', 'reschedule')) as acts (age, actor, action)"
    )

    assert [await sample(session), await sample(session)] == [1, 0]


@pytest.mark.parametrize(("unit", "step"), [("hour", HOUR), ("day", 24 * HOUR)])
async def test_attempts_are_summed_by_hour_or_day_with_the_first_whole(
    session: AsyncSession, books: Books, unit: str, step: timedelta
) -> None:
    now = datetime.now(UTC)
    for ago in range(5):
        count_attempts(books, now - ago * step, 1)

    found = await sum_attempts(session, unit, 2 * step.total_seconds())

    assert [(each.provider, each.outcome, each.emails) for each in found] == [("smtp", "accepted", 1)] * 3


async def test_waiting_and_cancelled_emails_are_counted_and_not_pending(session: AsyncSession, books: Books) -> None:
    waiting, cancelled = books.enqueue(2)
    now = datetime.now(UTC)
    books.change(waiting, status="waiting", wait_until=now + HOUR, publish_due_at=None, created_at=now - 50 * HOUR)
    books.change(cancelled, status="cancelled", publish_due_at=None, created_at=now - 50 * HOUR)

    found = await count_for_monitor(session)

    exact = count_emails.sync(books.connection)
    assert (found.emails[Status.WAITING], found.emails[Status.PENDING]) == (1, 0)
    assert (exact[Status.WAITING], exact[Status.CANCELLED], exact[Status.PENDING]) == (1, 1, 0)
    assert (found.oldest_pending_seconds, found.longest_due_seconds) == (None, None)


async def test_age_and_latency_of_scheduled_emails_count_from_the_schedule(session: AsyncSession, books: Books) -> None:
    scheduled, usual, sent = books.enqueue(3)
    now = datetime.now(UTC)
    books.change(scheduled, created_at=now - 50 * HOUR, due_since=now - HOUR / 2)
    books.change(sent, status="sent", created_at=now - HOUR, due_since=now - timedelta(seconds=2), sent_at=now)
    recent = (await count_for_monitor(session)).oldest_pending_seconds
    books.change(usual, created_at=now - HOUR)
    older = (await count_for_monitor(session)).oldest_pending_seconds
    latency = measure_latency.sync(books.connection)

    assert recent == pytest.approx(1800, abs=60)
    assert older == pytest.approx(3600, abs=60)
    assert latency is not None
    assert latency.p99_seconds == pytest.approx(2, abs=0.01)


async def test_the_newest_emails_show_how_fast_each_host_and_provider_is(session: AsyncSession, books: Books) -> None:
    now = datetime.now(UTC)
    for at, (worker, provider, seconds) in enumerate(
        [("mail-1:w0:7:ab", "smtp", 0.03), ("mail-1:w1:8:cd", "smtp", 0.05), ("mail-2:w0:7:ef", "ses", 0.45)]
    ):
        books.change(
            books.enqueue_one(),
            status="sent",
            sent_at=now - timedelta(seconds=120 - at),
            leased_at=now - timedelta(seconds=121),
            provider=provider,
            attempt_worker=worker,
            attempt_started_at=now - timedelta(seconds=seconds),
            attempt_finished_at=now,
        )

    odd = books.enqueue_one()
    books.change(odd, status="sent", sent_at=now, provider="ses", attempt_worker="mail-2:w0:7:ef")
    books.change(odd, attempt_started_at="-infinity", attempt_finished_at="infinity")
    elsewhere, confirmed = books.enqueue(2)  # the attempt is in a row of its own; an operator said that it arrived
    books.change(elsewhere, status="sent", sent_at=now - timedelta(seconds=60), provider="ses")
    books.change(confirmed, status="sent", sent_at=now, provider="ses", leased_at=now - HOUR, settled_at=now - HOUR / 2)
    for email_id in (elsewhere, confirmed):
        books.connection.execute(
            "insert into email_attempt (email_id, attempt_number, worker, provider, started_at, finished_at, outcome)"
            " values (%s, 1, 'mail-2:w0:7:ef', 'ses', %s, %s, 'accepted')",
            [email_id, now - timedelta(seconds=0.45), now],
        )

    paces = await measure_paces(session)

    seen: dict[str | None, Any] = {
        each.host or each.provider: (each.emails, round(each.per_minute, 1), each.p50_seconds) for each in paces
    }
    assert seen == {
        "mail-1": (2, 1.0, pytest.approx(0.04)),
        "smtp": (2, 1.0, pytest.approx(0.04)),
        "mail-2": (2, 1.0, pytest.approx(0.45)),
        "ses": (2, 1.0, pytest.approx(0.45)),
    }


SINCE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_the_oldest_open_transaction_of_this_database_is_found(database_url: str) -> None:
    with connected(database_url) as connection:
        assert find_oldest_transaction.sync(connection, older_seconds=0.0) is None
    with (
        psycopg.connect(database_url, application_name="nightly-report") as report,
        psycopg.connect(database_url, application_name="younger") as younger,
        connected(database_url) as connection,
    ):
        for each in (report, younger):
            each.execute("set transaction isolation level repeatable read")
            each.execute("select 1")
            connection.execute("create table if not exists dispatcher.written as select pg_current_xact_id()")
            connection.execute("insert into dispatcher.written values (pg_current_xact_id())")

        found = find_oldest_transaction.sync(connection, older_seconds=0.0)

        assert found is not None
        pid = str(report.info.backend_pid)
        assert (found.kind, found.name, found.application) == ("session", pid, "nightly-report")
        assert found.transactions >= 2
        assert find_oldest_transaction.sync(connection) is None  # it is not old enough to be reported


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        ("session", "4711", "select pg_terminate_backend(4711)"),
        ("prepared transaction", "7'; drop table t; --", "rollback prepared '7''; drop table t; --'"),
        ("replication slot", "standby_2", "select pg_drop_replication_slot('standby_2')"),
        ("standby", "standby_2", "hot_standby_feedback"),
    ],
)
def test_each_kind_is_named_with_what_to_do(kind: str, name: str, remedy: str) -> None:
    finding = old_transaction_finding(OldTransaction(kind, name, "app", None, SINCE, 12_000))

    assert old_transaction_finding(None).state is CheckState.OK
    assert finding.state is CheckState.WARNING
    assert f"{kind} {name} (user app, open since 2026-01-02 03:04:05 UTC, 12,000 transactions" in finding.detail
    assert remedy in (finding.remedy or "")
