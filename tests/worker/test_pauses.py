"""Workers send nothing that an operator paused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

import pytest

from dispatcher.actions.pauses import ResumeProvider
from dispatcher.actions.runner import Face, Who
from dispatcher.actions.runner import run as run_action
from dispatcher.domain.controls import Controls, Pause, PauseScope
from dispatcher.domain.outcome import Deferred, Reason
from dispatcher.domain.status import Status
from dispatcher.errors import ProviderFault
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import Lease
from dispatcher.worker.bulk_calls import with_bulk_calls
from tests.store.pausing import pause, resume
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import Act, ScriptedBulk, ScriptedProvider, accept, answer, fail, leave_when_let_go
from tests.worker.stage_bench import FakeStore, StageBench, run

LONG_DEFERRAL = answer(Deferred(Reason.SERVER_ERROR, "later", "451", 60.0))


def publish(bench: Bench, email_ids: Sequence[UUID]) -> None:
    for email_id in email_ids:
        bench.books.change(email_id, publish_due_at=None, published_at=datetime.now(UTC))


def is_put_back(bench: Bench, email_id: UUID) -> bool:
    """Whether the email is pending, due and unpublished."""
    row = bench.books.row(email_id)
    return row["status"] == "pending" and row["publish_due_at"] is not None and row["published_at"] is None


@pytest.mark.parametrize("are_together", [False, True], ids=["messages", "a bundle in bulk calls"])
async def test_messages_of_a_paused_tenant_are_acked_and_emails_put_back(bench: Bench, are_together: bool) -> None:
    provider = ScriptedBulk()
    pause(bench.books.connection, "tenant", "acme")
    await bench.start([with_bulk_calls(provider, 50) if are_together else provider])
    paused = bench.books.enqueue(10, tenant_id="acme")
    others = bench.books.enqueue(10)
    publish(bench, paused)
    mixed = [each for pair in zip(paused, others, strict=True) for each in pair]
    await (bench.deliver_together(mixed) if are_together else bench.deliver(mixed))
    await bench.settled({"sent": 10, "pending": 10})
    await until(lambda: all(is_put_back(bench, each) for each in paused))

    assert provider.accepted == dict.fromkeys(others, 1)
    assert {bench.books.row(each)["attempt_count"] for each in paused} == {0}

    resume(bench.books.connection)
    await until_answer(lambda: bench.deliver(paused), lambda _: bench.books.statuses() == {"sent": 20})
    assert provider.accepted == dict.fromkeys([*paused, *others], 1)
    await bench.nothing_left_on_the_queue()


async def test_an_email_of_a_paused_tenant_whose_row_is_locked_is_put_back_when_it_is_free(bench: Bench) -> None:
    pause(bench.books.connection, "tenant", "acme")
    await bench.start(lock_seconds=0.2)
    locked, free = bench.books.enqueue(2, tenant_id="acme")
    publish(bench, [locked, free])
    with bench.books.locked(locked):
        await bench.deliver([locked, free])
        await bench.all_are_delivered()

    await until(lambda: is_put_back(bench, locked) and is_put_back(bench, free))
    assert bench.provider.calls == []


@pytest.mark.parametrize(
    ("scope", "name", "act"),
    [
        ("all", "", LONG_DEFERRAL),
        ("all", "", leave_when_let_go),
        ("lane", "normal", LONG_DEFERRAL),
        ("tenant", "acme", leave_when_let_go),
        ("provider", "a", LONG_DEFERRAL),
        ("provider", "a", leave_when_let_go),
    ],
)
async def test_waiting_leased_emails_are_released_in_two_seconds(bench: Bench, scope: str, name: str, act: Act) -> None:
    provider = ScriptedProvider("a")
    provider.always = act
    await bench.start([provider], RETRY_CAP_SECONDS="60")
    (email_id,) = await bench.enqueue(tenant_id="acme")
    await until(lambda: bool(provider.calls) and bench.books.status(email_id) == "sending")
    attempts = len(bench.books.outcomes(email_id))
    began_at = time.monotonic()
    pause(bench.books.connection, scope, name)

    await until(lambda: bench.books.status(email_id) == "pending")

    assert time.monotonic() - began_at < 2
    row = bench.books.row(email_id)
    assert row["publish_due_at"] is not None
    assert row["attempt_count"] == len(bench.books.outcomes(email_id)) >= attempts
    assert not provider.accepted


async def test_a_paused_lane_keeps_its_messages_while_the_other_lanes_are_sent(bench: Bench) -> None:
    await bench.begin(0, PREFETCH="4")
    bulk = bench.books.enqueue(20)
    for each in bulk:
        bench.books.change(each, lane="bulk")
    await bench.deliver(bulk, lane="bulk")
    await until(lambda: len(bench.provider.waiting) == 4)
    pause(bench.books.connection, "lane", "bulk")
    in_force_at = time.monotonic() + 2
    await until(lambda: time.monotonic() > in_force_at)
    bench.provider.let_go()
    normal = await bench.enqueue(20)

    await bench.settled({"sent": 24, "pending": 16})

    assert set(normal) < set(bench.provider.accepted)
    await until_answer(lambda: bench.waiting_messages("bulk"), lambda waiting: waiting == 16)
    resume(bench.books.connection)
    await bench.settled({"sent": 40})
    assert set(bench.provider.accepted.values()) == {1}


A_PAUSE = Pause(PauseScope.ALL, "", None, "maintenance", "ann", None)  # type: ignore[arg-type]


def test_while_postgresql_cannot_be_read_the_last_known_pauses_stay_in_force() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.store.controls = Controls((A_PAUSE,))
        await bench.pass_time(2)
        bench.store.lose["read_controls"].extend([False] * 50)
        ids = bench.enqueue(3)
        bench.deliver(*ids)
        await bench.pass_time(40)
        assert bench.statuses() == {Status.PENDING: 3}
        bench.store.controls = Controls()
        await bench.pass_time()
        bench.deliver(*ids)  # RabbitMQ, which got the messages back, delivers them again
        await bench.pass_time()

    assert run(scenario).statuses() == {Status.SENT: 3}


def test_a_busy_worker_leases_nothing_later_than_two_seconds_after_the_begin_of_a_pause() -> None:
    async def scenario(bench: StageBench) -> None:
        async def work(seconds: int) -> int:
            for _ in range(10 * seconds):
                bench.deliver(*bench.enqueue())
                await bench.pass_time(0.1)
            return bench.words.count("lease")

        assert await work(5) == 50
        bench.store.controls = Controls((A_PAUSE,))
        assert await work(2) == await work(5)

    run(scenario)


def test_before_the_first_read_nothing_is_leased() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.store.lose["read_controls"].extend([False] * 10)
        bench.deliver(*bench.enqueue(3))
        await bench.pass_time(5)
        assert bench.statuses() == {Status.PENDING: 3}
        await bench.pass_time()

    assert run(scenario).statuses() == {Status.SENT: 3}


class CountedReads(FakeStore):
    reads = 0

    async def read_controls(self) -> Controls:
        self.reads += 1
        return await super().read_controls()


def test_an_idle_worker_reads_no_controls_until_a_message_arrives_and_then_reads_them_before_the_lease() -> None:
    async def scenario(bench: StageBench) -> None:
        store = bench.store
        store.__class__ = CountedReads
        assert isinstance(store, CountedReads)
        await bench.pass_time(20)
        reads = store.reads
        await bench.pass_time()
        assert store.reads == reads
        store.controls = Controls((A_PAUSE,))
        bench.deliver(*bench.enqueue(3))
        await bench.pass_time(20)

    bench = run(scenario)
    assert bench.statuses() == {Status.PENDING: 3}
    assert "lease" not in bench.words


class SlowLease(FakeStore):
    """Answers a lease statement this many `seconds` after its commit, by the bench's clock; in the last 5.5, everything
    is paused."""

    seconds = 0.0

    async def lease(
        self, keys_by_id: dict[UUID, str], lease_seconds: float, paused_tenants: Sequence[str] = ()
    ) -> list[Lease]:
        found = await super().lease(keys_by_id, lease_seconds, paused_tenants)
        await asyncio.sleep(self.seconds - 5.5)
        self.controls = Controls((A_PAUSE,))
        await asyncio.sleep(5.5)
        return found


@pytest.mark.parametrize("seconds", [5.5, 30.0])
def test_emails_that_a_slow_lease_statement_returns_during_a_pause_are_released(seconds: float) -> None:
    async def scenario(bench: StageBench) -> None:
        bench.store.__class__ = SlowLease
        assert isinstance(bench.store, SlowLease)
        bench.store.seconds = seconds
        await bench.pass_time(1)
        bench.deliver(*bench.enqueue(3))
        await bench.pass_time(seconds + 15)

    bench = run(scenario)
    assert (bench.statuses(), bench.provider.calls) == ({Status.PENDING: 3}, [])


@pytest.mark.parametrize(
    "act",
    [
        answer(Deferred(Reason.THROTTLED, "slow down", "429", 3000.0)),
        answer(Deferred(Reason.SERVER_ERROR, "maintenance", "503", 3000.0)),
        fail(ProviderFault("scripted", "the account is suspended"), after_leaving=True),
    ],
    ids=["throttled", "asked to wait", "fault"],
)
async def test_resume_ends_a_workers_own_wait_within_two_seconds(bench: Bench, tables_url: str, act: Act) -> None:
    bench.provider.always = act
    await bench.start()
    email_ids = await bench.enqueue(20)
    waits = "select from provider_state where state in ('open', 'paused')"
    await until(lambda: bool(bench.books.select(waits)) and bench.books.statuses() == {"pending": 20})
    bench.provider.always = accept
    began_at = time.monotonic()

    async with await connect_async(tables_url, name="operator") as session:
        resume_it = ResumeProvider(provider="scripted", reason="the quota was raised")
        await run_action(session, resume_it, Who(Face.COMMAND, "ann@ops-1"))

    await until(lambda: not bench.books.select(waits))
    assert time.monotonic() - began_at < 2
    await bench.deliver(email_ids)
    await bench.settled({"sent": 20})
