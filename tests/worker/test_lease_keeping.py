"""A worker renews a lease until its email is finished. After a worker has lost a lease, it does not send the email."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import OnUncertain
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger_format import read_suspects
from dispatcher.host.ledger_reader import living_ledger
from dispatcher.providers.contract import Attempt
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.worker.bulk_calls import BulkSender
from tests.broker.proxy import Proxy
from tests.recovery.tally import counted
from tests.store.books import Books
from tests.store.fixtures import DATABASE_ID
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import (
    Act,
    ScriptedBulk,
    ScriptedProvider,
    accept,
    accept_when_let_go,
    answer,
    leave_when_let_go,
)

FAR = datetime(2100, 1, 1, tzinfo=UTC)
LEASE_SECONDS = "6"
"""The worker renews such a lease after two seconds, so four seconds remain if a busy machine stalls."""
LONGER_SECONDS = 6.5


@pytest.fixture
async def postgres(tables_url: str) -> AsyncIterator[Proxy]:
    """A proxy to PostgreSQL that a test can interrupt."""
    async with Proxy(tables_url) as running:
        yield running


def expired(books: Books) -> bool:
    return bool(books.select("select from email_log where status = 'sending' and locked_until < clock_timestamp()"))


async def test_the_lease_of_a_slow_send_is_renewed_again_and_again(bench: Bench) -> None:
    bench.provider.always = accept_when_let_go
    await bench.start(LEASE_SECONDS=LEASE_SECONDS)
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.provider.waiting)
    first = bench.books.row(email_id)["locked_until"]

    seen: list[bool] = []

    def renewed_twice() -> bool:
        seen.append(expired(bench.books))
        return bool((bench.books.row(email_id)["locked_until"] - first).total_seconds() > 3.5)

    await until(renewed_twice)
    bench.provider.let_go()

    await bench.settled({"sent": 1})
    assert not any(seen)
    assert bench.books.row(email_id)["lease_token"] == 1


async def test_the_lease_of_an_email_that_waits_for_a_retry_is_renewed_and_outlasts_the_wait(
    bench: Bench,
) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.provider.script[email_id].append(answer(Deferred(Reason.REFUSED, retry_after=LONGER_SECONDS)))
    await bench.start(LEASE_SECONDS=LEASE_SECONDS, RETRY_CAP_SECONDS="7")
    await bench.deliver([email_id])
    await until(lambda: bench.books.outcomes(email_id) == ["deferred"])

    seen: list[bool] = []
    ends: set[datetime] = set()

    def is_sent() -> bool:
        seen.append(expired(bench.books))
        ends.add(bench.books.row(email_id)["locked_until"])
        return bench.books.status(email_id) == "sent"

    await until(is_sent)
    assert not any(seen)
    assert len(ends) >= 3  # the first end, at least one later end, and None when no lease is left
    assert bench.books.row(email_id)["lease_token"] == 1


async def test_a_deferral_extends_the_lease_over_the_wait_so_an_outage_during_the_wait_loses_no_lease(
    bench: Bench,
) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=500.0))
    await bench.start(LEASE_SECONDS="60", RETRY_CAP_SECONDS="600")
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.books.outcomes(email_id) == ["deferred"])

    row = bench.books.row(email_id)

    assert (row["status"], row["lease_token"]) == ("sending", 1)
    assert 530 < (row["locked_until"] - datetime.now(UTC)).total_seconds() < 661


@pytest.mark.parametrize("status", ["sending", "held", "pending"])
async def test_a_worker_that_lost_a_lease_does_not_send_its_unsent_email(bench: Bench, status: str) -> None:
    bench.provider.always = leave_when_let_go
    await bench.start(LEASE_SECONDS=LEASE_SECONDS)
    email_id, neighbour = await bench.enqueue(2)
    await until(lambda: len(bench.provider.waiting) == 2)

    locked_by = "another" if status == "sending" else None
    bench.books.change(email_id, status=status, lease_token=7, locked_by=locked_by, locked_until=FAR)
    await until(lambda: bench.provider.waiting == {neighbour})
    bench.provider.let_go()

    await until(lambda: bench.books.status(neighbour) == "sent")
    assert bench.provider.accepted == {neighbour: 1}
    row = bench.books.row(email_id)
    assert (row["status"], row["lease_token"], row["attempt_count"]) == (status, 7, 1)


class AnsweredByHand(BulkSender):
    """Puts every email into a bulk call, which the test answers; see `BulkSender.begin`."""

    def __init__(self) -> None:
        super().__init__(ScriptedBulk(), 100)
        self.carried: dict[UUID, asyncio.Future[Outcome]] = {}

    def begin(self, email: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome]:  # noqa: ARG002
        return self.carried.setdefault(email.email_id, asyncio.get_running_loop().create_future())


async def test_an_email_stopped_before_the_first_step_of_its_task_is_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = AnsweredByHand()
    lost: set[UUID] = set()

    async def refused_and_lost_in_one_loop_turn(_: LeaseStore, tokens: Mapping[UUID, int], __: float) -> set[UUID]:
        lost.update(tokens)
        for email_id in tokens:
            provider.carried[email_id].set_result(Deferred(Reason.REFUSED))
        await asyncio.sleep(0)  # one loop iteration, after which each answer has a task
        return set()

    email_ids = bench.books.enqueue(3)
    await bench.deliver(email_ids)
    monkeypatch.setattr(LeaseStore, "renew", refused_and_lost_in_one_loop_turn)
    await bench.start([provider], LEASE_SECONDS="2")
    await until(lambda: lost == set(email_ids))

    await bench.settled({"pending": 3})
    await bench.nothing_left_on_the_queue()
    assert {row["attempt_count"] for row in bench.books.rows()} == {0}


async def test_a_worker_that_lost_a_lease_during_the_wait_for_a_retry_does_not_retry(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=50.0))
    worker = await bench.start(LEASE_SECONDS=LEASE_SECONDS, RETRY_CAP_SECONDS="60")
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.books.outcomes(email_id) == ["deferred"])
    bench.books.change(email_id, status="held", lease_token=7, locked_by=None, locked_until="epoch")

    await worker.stop()

    row = bench.books.row(email_id)
    assert (row["status"], row["lease_token"]) == ("held", 7)
    assert len(bench.provider.calls) == 1
    await bench.nothing_left_on_the_queue()


async def test_an_event_during_the_wait_for_a_retry_stops_the_retry(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=1.0))
    worker = await bench.start(RETRY_CAP_SECONDS="2")
    email_id, neighbour = await bench.enqueue(2)
    await until(lambda: all(bench.books.outcomes(each) == ["deferred"] for each in (email_id, neighbour)))
    bench.provider.always = accept

    bench.books.change(email_id, proven_by="sendgrid")

    await until(lambda: bench.books.status(neighbour) == "sent")
    # The worker renews the lease for the second attempt, and then releases the email.
    await until(lambda: bench.books.status(email_id) == "pending")
    await until(lambda: worker.in_flight == 0)
    assert bench.provider.accepted == {neighbour: 1}
    row = bench.books.row(email_id)
    assert (row["attempt_count"], row["proven_by"]) == (1, "sendgrid")


async def test_an_email_whose_lease_the_relay_voided_is_released_unsent_without_using_an_attempt(bench: Bench) -> None:
    bench.provider.always = leave_when_let_go
    worker = await bench.start()
    email_ids = await bench.enqueue(3)
    await until(lambda: len(bench.provider.waiting) == 3)

    living = living_ledger(worker.ledger)
    assert living is not None
    living.void_leases(steady_clock())
    bench.provider.let_go()

    await bench.settled({"pending": 3})
    assert bench.provider.accepted == {}
    assert {row["attempt_count"] for row in bench.books.rows()} == {0}
    await until(lambda: worker.in_flight == 0)
    # Leases that the worker takes from now on are valid.
    await bench.deliver(email_ids)
    await bench.settled({"sent": 3})


async def test_a_lease_renewed_after_the_relay_voided_leases_stays_valid(bench: Bench) -> None:
    bench.provider.always = leave_when_let_go
    worker = await bench.start(LEASE_SECONDS=LEASE_SECONDS)
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.provider.waiting)
    living = living_ledger(worker.ledger)
    assert living is not None

    living.void_leases(steady_clock())
    ends = {bench.books.row(email_id)["locked_until"]}

    def renewed_twice() -> bool:
        ends.add(bench.books.row(email_id)["locked_until"])
        return len(ends) > 2

    await until(renewed_twice)  # so that the worker has the reply to the first renewal
    bench.provider.let_go()

    await bench.settled({"sent": 1})
    assert bench.books.row(email_id)["lease_token"] == 1


async def test_an_acceptance_after_a_lost_lease_is_recorded_as_evidence(bench: Bench) -> None:
    bench.provider.always = accept_when_let_go
    await bench.start(LEASE_SECONDS=LEASE_SECONDS)
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.provider.waiting)
    bench.books.change(email_id, status="held", lease_token=7, locked_by=None, dead_letter_due_at=FAR)

    bench.provider.let_go()

    await bench.settled({"sent": 1})
    assert bench.books.row(email_id)["dead_letter_due_at"] is None
    await bench.nothing_left_on_the_queue()


async def test_nothing_is_sent_under_a_lease_that_may_have_expired(bench: Bench, postgres: Proxy) -> None:
    refused: list[bool] = []

    async def leave_late(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        await provider.wait(email.email_id)
        try:
            attempt.mark_on_wire()
        except BaseException:
            refused.append(True)
            raise
        return provider.accept(email.email_id)

    bench.provider.always = leave_late
    await bench.start(DATABASE_URL=postgres.url, LEASE_SECONDS="3")
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.provider.waiting)
    postgres.freeze()  # from here on, the worker cannot renew leases
    await until(lambda: expired(bench.books))
    bench.provider.let_go()
    await until(lambda: refused)
    postgres.cut()
    postgres.thaw()

    await until(lambda: bench.books.status(email_id) == "pending")
    assert bench.provider.accepted == {}
    row = bench.books.row(email_id)
    assert (row["attempt_count"], row["publish_due_at"] is None) == (0, False)
    await bench.deliver([email_id])
    await bench.settled({"sent": 1})
    assert bench.provider.accepted == {email_id: 1}


def answer_when_let_go(outcome: Outcome) -> Act:
    async def act(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        attempt.mark_on_wire()
        await provider.wait(email.email_id)
        return provider.accept(email.email_id) if isinstance(outcome, Accepted) else outcome

    return act


async def never_leave(_: ScriptedProvider, __: OutgoingEmail, ___: Attempt) -> Outcome:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_worker_that_was_disconnected_undoes_the_recovery_of_emails_that_were_not_accepted(
    bench: Bench, postgres: Proxy, tables_url: str
) -> None:
    on_the_wire: list[Outcome] = [Accepted(), Deferred(Reason.REFUSED), Rejected(Reason.REFUSED), Uncertain("silence")]
    unbegun, waiting, accepted, deferred, rejected, silent = bench.books.enqueue(6)
    bench.provider.script[unbegun].append(never_leave)
    bench.provider.script[waiting].append(answer(Deferred(Reason.REFUSED, retry_after=50.0)))
    for email_id, outcome in zip((accepted, deferred, rejected, silent), on_the_wire, strict=True):
        bench.provider.script[email_id].append(answer_when_let_go(outcome))
    await bench.start(DATABASE_URL=postgres.url, LEASE_SECONDS="3", RETRY_CAP_SECONDS="60", MAX_ATTEMPTS="3")
    await bench.deliver([unbegun, waiting, accepted, deferred, rejected, silent])
    await until(lambda: len(bench.provider.calls) == 6 and bench.books.outcomes(waiting) == ["deferred"])

    postgres.freeze()
    bench.books.connection.execute("update email_log set locked_until = '2026-01-01' where status = 'sending'")
    async with await connect_async(tables_url, name="leader") as session:
        outbox = Outbox(session)
        await outbox.recover_expired(OnUncertain.HOLD, 3, await outbox.find_expiring())
    assert bench.books.statuses() == {"held": 6}
    with counted() as counts:
        bench.provider.let_go()
        postgres.cut()
        postgres.thaw()
        await until(lambda: bench.books.statuses() == {"pending": 3, "sent": 1, "failed": 1, "held": 1})

    assert counts["lease_lost",] == 3  # all emails except the accepted one, which was recorded as evidence
    ids = [unbegun, waiting, accepted, deferred, rejected, silent]
    assert [bench.books.status(i) for i in ids] == ["pending", "pending", "sent", "pending", "failed", "held"]
    rows = [bench.books.row(email_id) for email_id in ids]
    assert [row["attempt_count"] - row["attempt_base"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert bench.books.count("operator_audit") == 4
    await bench.deliver([unbegun])
    bench.provider.script[unbegun].clear()
    await until(lambda: bench.books.status(unbegun) == "sent")
    assert bench.provider.accepted == {accepted: 1, unbegun: 1}


async def test_an_adapter_that_calls_leaving_twice_uses_one_ledger_slot(bench: Bench) -> None:
    async def twice(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        attempt.mark_on_wire()
        attempt.mark_on_wire()
        await asyncio.sleep(0)
        return provider.accept(email.email_id)

    bench.provider.always = twice
    worker = await bench.start(PREFETCH="1")
    await bench.enqueue(5)

    await bench.settled({"sent": 5})
    await until(lambda: worker.in_flight == 0)


async def test_the_ledger_matches_the_state_of_an_email_on_the_wire(bench: Bench, tables_url: str) -> None:
    bench.provider.always = accept_when_let_go
    worker = await bench.start()
    first, _ = await bench.enqueue(2)
    await until(lambda: len(bench.provider.waiting) == 2)
    assert worker.in_flight == 2
    found = living_ledger(worker.ledger)
    assert found is not None
    assert found.database_id == DATABASE_ID

    with psycopg.connect(tables_url) as person:
        Books(person).lock(first)
        bench.provider.let_go()
        await until(lambda: bench.books.waiting_for_a_lock(worker.name))
        assert worker.in_flight == 2  # answered, but not recorded

    await bench.settled({"sent": 2})
    await until(lambda: worker.in_flight == 0)


async def test_an_email_is_a_suspect_only_while_it_is_rendered(bench: Bench) -> None:
    seen: list[list[UUID]] = []

    def look() -> None:
        content = bench.workers[0].ledger.read_bytes()
        seen.append([suspect.email_id for suspect in read_suspects(content)])

    async def render(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        with attempt.rendering:
            look()
        look()
        attempt.mark_on_wire()
        return provider.accept(email.email_id)

    bench.provider.always = render
    await bench.start()
    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1})
    assert seen == [[email_id], []]
