"""A worker is frozen until its leases expire: the relay immediately releases unsent emails, and the woken worker sends
nothing twice.

The test acts as the worker: it locks the ledger, and the worker is frozen whenever the test does nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from dispatcher.config import Settings, load
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_reader import living_ledger
from dispatcher.recovery.frozen_worker import POLL_SECONDS, FrozenWorkers
from dispatcher.store.connections import Pool, connect_async, make_pool
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.outbox import Outbox
from tests.recovery.lost_workers import SLOT, WORKER, on_the_wire
from tests.recovery.tally import counted
from tests.store.books import Books
from tests.store.fixtures import DATABASE_ID
from tests.store.results import result
from tests.store.steered_clock import SteeredClock
from tests.waiting import until

EXPIRED: Final = datetime(2026, 1, 1, tzinfo=UTC)

Look = Callable[..., Coroutine[Any, Any, None]]


@dataclass
class Relay:
    """Settles the expired leases of one ledger, and moves its own monotonic clock."""

    pool: Pool
    ledger: Ledger
    report: Callable[[Path, str], None] = lambda _, reason: pytest.fail(reason)
    clock: float = 0.0
    redeliver_for: str = "0"

    async def look_for(self, seconds: float = 70.0) -> None:
        """Runs rounds for this time, by the relay's own clock. A lease lasts 60 seconds."""
        expired = FrozenWorkers(
            settings(DISPATCHER_REDELIVER_FOR=self.redeliver_for), self.pool, self.report, clock=lambda: self.clock
        )
        living = living_ledger(self.ledger.path)
        assert living is not None
        until_clock = self.clock + seconds
        await expired.settle([living])
        while self.clock < until_clock:
            self.clock += 5.0
            await expired.settle([living])


@pytest.fixture
async def worker_pool(tables_url: str) -> AsyncIterator[Pool]:
    """The worker's pool of PostgreSQL sessions."""
    opened = make_pool(tables_url, name=WORKER, size=1)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def worker(worker_pool: Pool) -> LeaseStore:
    """The worker's lease store."""
    return LeaseStore(worker_pool, worker=WORKER, slot=SLOT)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """The worker's ledger, locked until the end of the test."""
    made = Ledger(tmp_path / "run", worker=WORKER, slot=SLOT, slots=64)
    made.set_database(DATABASE_ID)
    return made


@pytest.fixture
async def relay_pool(tables_url: str) -> AsyncIterator[Pool]:
    """The relay's pool of PostgreSQL sessions."""
    opened = make_pool(tables_url, name="dispatcher relay settlement", size=1)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def look(relay_pool: Pool, ledger: Ledger) -> Look:
    """Runs the relay's rounds until it has settled the expired leases."""
    return Relay(relay_pool, ledger).look_for


def settings(**given: str) -> Settings:
    return load({"DISPATCHER_MAX_ATTEMPTS": "3", **given})


async def lease(worker: LeaseStore, books: Books, count: int = 1, **fields: object) -> list[Lease]:
    leases = await worker.lease(books.keys(books.enqueue(count, **fields)), 600)
    return sorted(leases, key=lambda each: each.email_id)


def run_out(books: Books, *leases: Lease) -> None:
    for each in leases:
        books.change(each.email_id, locked_until=EXPIRED)


def answer(ledger: Ledger, each: Lease, outcome: Outcome) -> None:
    ledger.mark_answered(on_the_wire(ledger, each), outcome, finished_at=1_790_000_001.0)


async def test_a_search_is_not_put_off_because_the_relay_looks_some_milliseconds_before_it_is_due(
    monkeypatch: pytest.MonkeyPatch, relay_pool: Pool, ledger: Ledger
) -> None:
    searched_at: list[float] = []
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    expired = FrozenWorkers(settings(), relay_pool, lambda *_: None)

    async def settle(_: object) -> None:
        searched_at.append(now)

    monkeypatch.setattr(expired, "settle", settle)
    living = living_ledger(ledger.path)
    assert living is not None
    for second in range(20):
        now = 1000.0 + second + 0.01 * (second % 3 == 0)
        await expired.settle_when_due([living])

    assert max(after - before for before, after in pairwise(searched_at)) < POLL_SECONDS + 0.1


async def test_unsent_emails_are_released_at_once_and_use_no_attempt(
    look: Look, worker: LeaseStore, other_store: LeaseStore, books: Books
) -> None:
    leases = await lease(worker, books, 3)
    run_out(books, *leases)

    await look()

    for each in leases:
        row = books.row(each.email_id)
        assert (row["status"], row["attempt_count"], row["locked_by"]) == ("pending", 0, None)
        assert row["publish_due_at"] is not None
        assert books.attempts(each.email_id) == []
    assert len(await other_store.lease(books.keys([each.email_id for each in leases]), 60)) == 3


async def test_a_result_that_postgresql_refuses_does_not_end_the_relay(
    relay_pool: Pool, worker: LeaseStore, books: Books, ledger: Ledger
) -> None:
    refused, unsent = await lease(worker, books, 2)
    answer(ledger, refused, Rejected(Reason.REFUSED))
    run_out(books, refused, unsent)
    reports: list[str] = []
    relay = Relay(relay_pool, ledger, lambda _, reason: reports.append(reason))
    books.connection.execute("alter table email_attempt add constraint strict check (outcome <> 'rejected')")
    try:
        await relay.look_for(50)
    finally:
        books.connection.execute("alter table email_attempt drop constraint strict")

    assert len(set(reports)) == 1
    assert [books.status(each.email_id) for each in (refused, unsent)] == ["sending", "pending"]


async def test_released_emails_can_no_longer_be_sent(
    look: Look, worker: LeaseStore, books: Books, ledger: Ledger
) -> None:
    asked_at = steady_clock()
    (each,) = await lease(worker, books)
    run_out(books, each)

    await look()

    # The test now does what the woken worker does: it writes its slot, and checks its lease.
    on_the_wire(ledger, each)
    assert ledger.voided_at >= asked_at
    # Leases that the worker takes or renews from now on are valid.
    assert ledger.voided_at < steady_clock()


async def test_valid_leases_are_not_touched_or_voided(
    look: Look, worker: LeaseStore, other_store: LeaseStore, books: Books, ledger: Ledger
) -> None:
    (mine,) = await lease(worker, books)
    (theirs,) = await lease(other_store, books)
    run_out(books, theirs)
    before = books.rows()

    await look()

    assert books.rows() == before
    assert books.status(mine.email_id) == "sending"
    assert ledger.voided_at == 0.0


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Accepted("queued as 7"), "sent"),
        (Deferred(Reason.THROTTLED, retry_after=1.0), "pending"),
        (Rejected(Reason.REFUSED), "failed"),
    ],
    ids=str,
)
async def test_answered_emails_are_recorded_with_their_answer(
    look: Look, worker: LeaseStore, books: Books, ledger: Ledger, outcome: Outcome, status: str
) -> None:
    (each,) = await lease(worker, books)
    answer(ledger, each, outcome)
    run_out(books, each)

    await look()

    assert books.status(each.email_id) == status
    assert [attempt["worker"] for attempt in books.attempts(each.email_id)] == ["slot-1:relay"]
    assert not books.row(each.email_id)["was_uncertain"]


@pytest.mark.parametrize(
    ("host", "row", "status"),
    [
        ("0", {}, "failed"),
        ("3600", {}, "waiting"),
        ("3600", {"redeliver_seconds": 0}, "failed"),
        ("0", {"redeliver_seconds": 3600}, "waiting"),
        ("3600", {"max_attempts": 5}, "pending"),
    ],
    ids=str,
)
async def test_a_last_deferral_waits_for_a_redelivery_if_redelivery_is_on(
    relay_pool: Pool,
    worker: LeaseStore,
    books: Books,
    ledger: Ledger,
    host: str,
    row: dict[str, object],
    status: str,
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, attempt_count=2, **row)
    (each,) = await worker.lease(books.keys([email_id]), 600)
    answer(ledger, each, Deferred(Reason.SERVER_ERROR))
    run_out(books, each)

    await Relay(relay_pool, ledger, redeliver_for=host).look_for()

    assert books.status(email_id) == status


@pytest.mark.parametrize(("policy", "status"), [(None, "held"), (OnUncertain.RESEND, "pending")])
async def test_emails_on_the_wire_become_uncertain_and_are_judged_by_policy(
    look: Look, worker: LeaseStore, books: Books, ledger: Ledger, policy: OnUncertain | None, status: str
) -> None:
    each, unsent = sorted(await lease(worker, books, 2, on_uncertain=policy), key=lambda one: one.email_id)
    on_the_wire(ledger, each)
    run_out(books, each, unsent)

    with counted() as counts:
        await look()

    assert counts == Counter({("rescued", "worker_frozen"): 1, ("held", "worker_frozen"): int(status == "held")})
    row = books.row(each.email_id)
    assert (row["status"], row["error_type"], row["was_uncertain"]) == (status, "outcome_unknown", True)
    assert books.outcomes(each.email_id) == ["uncertain"]


async def test_emails_on_the_wire_are_left_to_their_worker_for_a_while(
    look: Look, worker: LeaseStore, books: Books, ledger: Ledger
) -> None:
    (each,) = await lease(worker, books)
    on_the_wire(ledger, each)
    run_out(books, each)

    await look(60)

    assert books.status(each.email_id) == "sending"
    assert await worker.record([result(each, Status.SENT)]) == {each.email_id}


@pytest.mark.parametrize("policy", OnUncertain)
async def test_a_late_answer_of_a_woken_worker_counts_only_if_it_is_an_acceptance(
    look: Look, worker: LeaseStore, books: Books, ledger: Ledger, policy: OnUncertain
) -> None:
    accepted, rejected = await lease(worker, books, 2, on_uncertain=policy)
    for each in (accepted, rejected):
        on_the_wire(ledger, each)
    run_out(books, accepted, rejected)
    await look()
    judged = books.row(rejected.email_id)

    ours = await worker.record([result(accepted, Status.SENT), result(rejected, Status.FAILED)])

    assert ours == {accepted.email_id}
    assert books.row(rejected.email_id) == judged
    row = books.row(accepted.email_id)
    assert (row["status"], row["publish_due_at"], row["dead_letter_due_at"]) == ("sent", None, None)
    assert books.outcomes(accepted.email_id) == ["uncertain", "accepted"]


async def test_a_late_acceptance_ends_the_current_lease_of_another_worker(
    look: Look, worker: LeaseStore, other_store: LeaseStore, books: Books, ledger: Ledger
) -> None:
    (each,) = await lease(worker, books, on_uncertain=OnUncertain.RESEND)
    on_the_wire(ledger, each)
    run_out(books, each)
    await look()
    (again,) = await other_store.lease(books.keys([each.email_id]), 60)

    await worker.record([result(each, Status.SENT)])

    assert books.status(each.email_id) == "sent"
    # The other worker notices the lost lease at its next renewal or record, and overwrites nothing.
    assert await other_store.renew({again.email_id: again.token}, 60) == set()
    assert await other_store.record([result(again, Status.FAILED)]) == set()
    assert books.status(each.email_id) == "sent"


async def test_a_woken_worker_does_not_release_a_lost_lease_twice(
    look: Look, worker: LeaseStore, other_store: LeaseStore, books: Books
) -> None:
    waiting, taken = await lease(worker, books, 2)
    run_out(books, waiting, taken)
    await look()
    await other_store.lease(books.keys([taken.email_id]), 60)
    before = books.rows()

    tokens = {each.email_id: each.token for each in (waiting, taken)}
    assert await worker.release(tokens) == set()
    await worker.release_unanswered(list(tokens))

    assert books.rows() == before


async def test_a_worker_that_renews_during_the_settlement_keeps_its_lease(
    look: Look, worker: LeaseStore, books: Books, ledger: Ledger, tables_url: str
) -> None:
    unnamed, wire = await lease(worker, books, 2)
    on_the_wire(ledger, wire)
    run_out(books, unnamed, wire)
    with psycopg.connect(tables_url) as person:
        # The relay has read the expired leases, and waits for the row lock. The renewal commits before the relay gets
        # the lock.
        Books(person).lock(unnamed.email_id)
        looking = asyncio.create_task(look())
        await until(lambda: books.waiting_for_a_lock("dispatcher relay settlement"))
        renewed = "update email_log set locked_until = clock_timestamp() + interval '1 minute'"
        person.execute(renewed)
        person.commit()
        await looking

    assert books.statuses() == {"sending": 2}
    assert [row["lease_token"] for row in books.rows()] == [1, 1]
    # The relay records no attempt for a lease that it did not settle.
    assert books.count("every_attempt") == 0


async def test_a_renewal_counts_even_if_the_clock_was_set_back(worker: LeaseStore, books: Books) -> None:
    (each,) = await lease(worker, books)
    far = datetime(2100, 1, 1, tzinfo=UTC)
    books.change(each.email_id, locked_until=far)

    await worker.renew({each.email_id: each.token}, 60)

    assert books.row(each.email_id)["locked_until"] > far


async def test_a_refused_answer_loses_the_providers_text_and_affects_no_other_email(
    look: Look, worker: LeaseStore, books: Books, ledger: Ledger
) -> None:
    leases = await lease(worker, books, 3)
    for each in leases:
        answer(ledger, each, Rejected(Reason.REFUSED, "a NUL \0 inside" if each is leases[1] else "no"))
    run_out(books, *leases)

    await look()

    assert [books.row(each.email_id)["last_error"] for each in leases] == ["no", None, "no"]
    assert books.statuses() == {"failed": 3}


async def test_the_leading_relay_leaves_leases_of_its_own_host_to_ledgers_and_waits_for_those_of_others(
    worker: LeaseStore, other_store: LeaseStore, books: Books, tables_url: str
) -> None:
    (here,) = await lease(worker, books)
    young, old = await lease(other_store, books, 2)
    run_out(books, here, old)
    books.connection.execute(
        "update email_log set locked_until = clock_timestamp() - interval '1 second' where email_id = %s",
        [young.email_id],
    )
    async with await connect_async(tables_url, name="leader") as session:
        outbox = Outbox(session)
        found = await outbox.find_expiring([WORKER])
        rescued = await outbox.recover_expired(OnUncertain.HOLD, 3, found, grace_seconds=60)

    assert [email.email_id for email in rescued] == [old.email_id]
    assert books.row(old.email_id)["was_uncertain"]


async def test_an_unreadable_ledger_is_reported_and_no_lease_is_taken(
    worker: LeaseStore, books: Books, ledger: Ledger, relay_pool: Pool
) -> None:
    (each,) = await lease(worker, books)
    run_out(books, each)
    reported: list[str] = []
    relay = Relay(relay_pool, ledger, lambda _, reason: reported.append(reason))
    watching = asyncio.create_task(relay.look_for())
    os.truncate(ledger.path, 700)

    await watching

    assert set(reported) == {"the file is truncated"}
    assert books.status(each.email_id) == "sending"


async def test_a_jump_of_postgresqls_clock_takes_no_lease_from_a_worker_that_renews(
    clock: SteeredClock, look: Look, worker: LeaseStore, books: Books, ledger: Ledger
) -> None:
    wire, unsent = await lease(worker, books, 2)
    on_the_wire(ledger, wire)
    await look(5)
    clock.set(3600)

    for _ in range(3):
        await look(40)
        await worker.renew({each.email_id: each.token for each in (wire, unsent)}, 60)

    assert books.statuses() == {"sending": 2}
    assert ledger.voided_at == 0.0
