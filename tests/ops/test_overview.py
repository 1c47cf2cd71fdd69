"""The Overview: its figures, what a tenant's visitor sees, and one query for all who look at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dispatcher.config import Settings, load
from dispatcher.errors import StoreUnavailable
from dispatcher.ops.hosts import hosts_of
from dispatcher.ops.overview import Overview, OverviewReader, Point, points_of_minutes
from dispatcher.ops.shared_reading import SharedReading
from dispatcher.store.connections import AsyncSession
from dispatcher.store.figures import BoundedCount, HostReport, WorkerSeen
from dispatcher.store.samples import MinuteSample, QueueDepth, report_processes, save_sample
from tests.store.books import Books
from tests.store.pausing import pause


@pytest.fixture
def settings(tables_url: str) -> Settings:
    given = {"DATABASE_URL": tables_url, "AMQP_URL": "amqp://unused.invalid", "PROVIDERS": "smtp"}
    given |= {"SMTP_HOST": "smtp.invalid", "SMTP_MAX_PER_SECOND": "50"}
    return load({f"DISPATCHER_{name}": value for name, value in given.items()})


@pytest.fixture
def reader(settings: Settings, session: AsyncSession) -> OverviewReader:
    @asynccontextmanager
    async def open_session() -> AsyncIterator[AsyncSession]:
        yield session

    return OverviewReader(settings, open_session, fresh_seconds=-1.0, trends_fresh_seconds=-1.0)


async def read(reader: OverviewReader, tenant_id: str | None = None) -> Overview:
    return (await reader.get(tenant_id)).value


async def test_all_figures_of_a_busy_dispatcher(reader: OverviewReader, books: Books, session: AsyncSession) -> None:
    now = datetime.now(UTC)
    sent, *_ = books.enqueue(3, tenant_id="acme")
    books.change(sent, status="sent", created_at=now - timedelta(seconds=3), sent_at=now, publish_due_at=None)
    execute = books.connection.execute
    execute("insert into email_hourly values (date_trunc('hour', now(), 'UTC'), 'smtp', 'accepted', 's', 41)")
    execute("insert into email_hourly values (date_trunc('hour', now(), 'UTC'), 'smtp', 'deferred', 's', 2)")
    execute("insert into provider_state values ('smtp', 'a:w0', 'open', 'connection_failed', now(), now() + '9 s')")
    execute("insert into provider_rate values ('smtp', 12.5, 0, now(), now())")
    execute("insert into lane_policy (lane, weight) values ('bulk', 3)")
    execute(
        "insert into alert_check values ('email.dispatcher.dlq', 'host-1', now(), 4, null,"
        """ '[{"kind": "dead_letters", "raised_at": "2026-11-24T00:00:00+00:00", "count": 4,"""
        """ "oldest_age_seconds": 9.0, "reason": null}]')"""
    )
    pause(books.connection, "tenant", "acme")
    queues = {"bulk": QueueDepth(12, 3), "dlq": QueueDepth(4, 0)}
    await save_sample(session, queues, every_seconds=0.0)

    found = await read(reader)

    assert found.paused == BoundedCount(2)
    assert found.latency is not None
    assert found.latency.p50_seconds == pytest.approx(3, abs=0.1)
    assert found.hours[-1] == replace(found.hours[-1], sent=41, not_sent=2)
    assert found.days[-1].sent == 41
    assert (len(found.minutes), len(found.hours), len(found.days)) == (60, 24, 31)
    (provider,) = found.providers
    assert provider.problem is not None
    assert (provider.problem.state, provider.problem.reason) == ("open", "connection_failed")
    assert provider.rate is not None
    assert (provider.rate.per_second, provider.rate.was_throttled, provider.ceiling) == (12.5, True, 50)
    assert (provider.sent, provider.not_sent) == (41, 2)
    bulk = next(lane for lane in found.lanes if lane.name == "bulk")
    assert (bulk.weight, bulk.messages, bulk.workers) == (3, 12, 3)
    assert found.check is not None
    assert [alert.kind for alert in found.check.active] == ["dead_letters"]
    assert (found.check.host, found.check.depth) == ("host-1", 4)
    assert found.is_sampled


async def test_dead_letters_are_the_failed_emails_that_nobody_decided_and_a_tenants_visitor_gets_only_its_own(
    reader: OverviewReader, books: Books, session: AsyncSession
) -> None:
    one, suppressed, discarded, held, _pending = books.enqueue(5, tenant_id="acme")
    two, *_ = books.enqueue(4, tenant_id="other")
    for email_id in (one, two, suppressed, discarded):
        books.change(email_id, status="failed", publish_due_at=None)
    books.change(suppressed, error_type="suppressed")
    books.change(discarded, dead_letter_discarded_at=datetime.now(UTC))
    books.change(held, status="held", publish_due_at=None)
    none_paused = (await read(reader)).paused
    pause(books.connection, "tenant", "acme")
    pause(books.connection, "tenant", "other")
    await report_processes(session, "host-1:x", "host-1", [])
    await save_sample(session, {"dlq": QueueDepth(4, 0)}, every_seconds=0.0)

    every, own = await read(reader), await read(reader, "acme")

    names = ("dead_letters", "held", "pending", "sending", "waiting", "cancelled", "kept_back")
    assert every.counts == dict(zip(names, map(BoundedCount, (2, 1, 4, 0, 0, 0, 0)), strict=True))
    assert [own.counts[name] for name in names[:3]] == [BoundedCount(1)] * 3
    assert none_paused == BoundedCount(0)
    assert own == Overview(own.taken_at, own.counts, hours=own.hours, days=own.days)


def sample_at(minute: datetime, **attempts: int) -> MinuteSample:
    return MinuteSample(minute, minute, 0.0, {}, None, None, None, attempts)


def test_a_minute_without_a_sample_is_unknown_and_not_zero() -> None:
    now = datetime(2026, 11, 24, 12, 30, 20, tzinfo=UTC)
    minutes = [now.replace(second=0) - timedelta(minutes=ago) for ago in (4, 3, 1, 0)]
    totals = [{"accepted": 10}, {"accepted": 25, "deferred": 1}, {"accepted": 70}, {"accepted": 70, "deferred": 4}]

    points = points_of_minutes([sample_at(at, **attempts) for at, attempts in zip(minutes, totals, strict=True)], now)

    between = minutes[1] + timedelta(minutes=1)
    unknown = [Point(minute, None, None) for minute in (minutes[0], between, minutes[2])]
    assert points[-5:] == [unknown[0], Point(minutes[1], 15, 1), *unknown[1:], Point(minutes[3], 0, 4)]


def test_hosts_have_their_processes_with_restarts_and_vanished_hosts_come_first(settings: Settings) -> None:
    row = {"role": "worker", "number": 0, "pid": 42, "is_up": True, "is_ending": False, "restarts": 3}
    rows = [
        {**row, "age_seconds": 10.0, "reason": ""},
        {**row, "role": "relay", "pid": 43, "is_up": False, "age_seconds": None, "reason": "No such host."},
    ]
    workers = [WorkerSeen("a:w0:42:beef", 15.0, 7, 20.0), WorkerSeen("z:w1:9:beef", None, 4, 25.0)]

    now = datetime.now(UTC)
    reports = [HostReport("a", now, 5.0, "1.0", rows), HostReport("s", now, 10_800.0, "1.0", [])]
    silent, vanished, living = hosts_of(workers, reports, settings)

    assert (silent.name, silent.is_vanished, silent.silent_seconds) == ("s", True, 10_800.0)
    assert silent.settled_in_seconds is None
    assert (vanished.name, vanished.in_flight, vanished.is_vanished) == ("z", 4, True)
    assert vanished.settled_in_seconds is not None
    assert [process.state for process in vanished.processes] == ["dead"]
    worker, relay = living.processes
    assert (worker.name, worker.state, worker.age_seconds, worker.in_flight) == ("worker 0", "up", 15.0, 7)
    assert worker.restarts == 3
    assert (relay.name, relay.state, relay.reason, relay.in_flight) == ("relay", "failing", "No such host.", None)


async def test_many_viewers_share_one_read_and_the_next_second_reads_again() -> None:
    reads = 0
    may_end = asyncio.Event()

    async def slow() -> int:
        nonlocal reads
        reads += 1
        await may_end.wait()
        return reads

    shared = SharedReading(slow, fresh_seconds=60.0)
    viewers = [asyncio.create_task(shared.get()) for _ in range(50)]
    await asyncio.sleep(0)
    viewers.pop().cancel()  # a viewer that leaves does not end the others' read
    may_end.set()

    assert {answer.value for answer in await asyncio.gather(*viewers)} == {1}
    assert (await shared.get()).value == 1
    shared.forget()
    assert (await shared.get()).value == 2


async def test_while_a_read_hangs_or_fails_viewers_get_the_last_value_with_its_age() -> None:
    reads = 0
    fault: list[StoreUnavailable] = []
    hang = asyncio.Event()
    hang.set()

    async def read() -> int:
        nonlocal reads
        reads += 1
        await hang.wait()
        if fault:
            raise fault[0]
        return reads

    shared = SharedReading(read, fresh_seconds=-1.0, patience_seconds=0.01)
    fault.append(StoreUnavailable("PostgreSQL is not available."))
    with pytest.raises(StoreUnavailable):  # there is no earlier value
        await shared.get()
    fault.clear()
    reads = 0
    assert (await shared.get()).fault is None
    hang.clear()
    stale = [await shared.get() for _ in range(3)]
    assert ({answer.value for answer in stale}, reads) == ({1}, 2)
    assert all(answer.fault and answer.age_seconds > 0 for answer in stale)
    fault.append(StoreUnavailable("PostgreSQL is not available."))
    hang.set()
    await asyncio.sleep(0)

    answer = await shared.get()

    assert (answer.value, answer.fault) == (1, "PostgreSQL is not available.")
