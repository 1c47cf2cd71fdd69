"""A worker is frozen until its leases expire: the relay immediately releases unsent emails, and the woken worker sends
nothing twice.

The test acts as the worker: it locks the ledger, and the worker is frozen whenever the test does nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_reader import LivingLedger, living_ledger
from dispatcher.recovery.frozen_worker import FrozenWorkers
from dispatcher.store.connections import Pool, connect_async, make_pool
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.outbox import Outbox
from tests.recovery.lost_workers import EXPIRED, RELAY, SLOT, WORKER, Host, answered, on_the_wire, settings
from tests.recovery.tally import counted
from tests.store.damage import constraint
from tests.store.fixtures import DATABASE_ID
from tests.store.results import result
from tests.store.steered_clock import SteeredClock
from tests.waiting import until


@dataclass
class Frozen:
    """A worker that is frozen, and the relay that settles its expired leases and moves its own monotonic clock."""

    host: Host
    ledger: Ledger
    pool: Pool
    reports: list[str] = field(default_factory=list)
    clock: float = 0.0

    @property
    def living(self) -> LivingLedger:
        found = living_ledger(self.ledger.path)
        assert found is not None
        return found

    async def look(self, seconds: float = 70.0, **given: str) -> None:
        """Runs the relay's rounds for this time, by the relay's own clock. A lease lasts 60 seconds."""
        living, until_clock = self.living, self.clock + seconds
        relay = FrozenWorkers(
            settings(**given), self.pool, lambda _, reason: self.reports.append(reason), clock=lambda: self.clock
        )
        await relay.settle([living])
        while self.clock < until_clock:
            self.clock += 5.0
            await relay.settle([living])

    def run_out(self, *leases: Lease) -> None:
        for each in leases:
            self.host.books.change(each.email_id, locked_until=EXPIRED)


@pytest.fixture
async def frozen(host: Host) -> AsyncIterator[Frozen]:
    """A worker whose ledger is locked until the end of the test."""
    ledger = Ledger(host.run_dir, worker=WORKER, slot=SLOT, slots=64)
    ledger.set_database(DATABASE_ID)
    async with make_pool(host.url, name=RELAY, size=1) as pool:
        yield Frozen(host, ledger, pool)


LAST = {"attempt_count": 2}
ON_THE_WIRE = "on the wire"
BUSY = Deferred(Reason.SERVER_ERROR)


@pytest.mark.parametrize(
    ("state", "before", "redeliver_for", "status"),
    [
        (None, {}, "0", "pending"),
        (ON_THE_WIRE, {}, "0", "held"),
        (ON_THE_WIRE, {"on_uncertain": "resend"}, "0", "pending"),
        (Accepted("queued as 7"), {}, "0", "sent"),
        (Deferred(Reason.THROTTLED, retry_after=1.0), {}, "0", "pending"),
        (Rejected(Reason.REFUSED), {}, "0", "failed"),
        (BUSY, LAST, "0", "failed"),
        (BUSY, LAST, "3600", "waiting"),
        (BUSY, {**LAST, "redeliver_seconds": 0}, "3600", "failed"),
        (BUSY, {**LAST, "redeliver_seconds": 3600}, "0", "waiting"),
        (BUSY, {**LAST, "max_attempts": 5}, "3600", "pending"),
    ],
    ids=str,
)
async def test_an_expired_lease_is_settled_by_the_emails_state_in_the_ledger(
    frozen: Frozen,
    other_store: LeaseStore,
    state: Outcome | str | None,
    before: dict[str, Any],
    redeliver_for: str,
    status: str,
) -> None:
    host = frozen.host
    (each,), (unsent,) = await host.lease(**before), await host.lease()
    if state == ON_THE_WIRE:
        on_the_wire(frozen.ledger, each)
    elif isinstance(state, Outcome):
        answered(state)(frozen.ledger, each)
    frozen.run_out(each, unsent)

    with counted() as counts:
        await frozen.look(DISPATCHER_REDELIVER_FOR=redeliver_for)

    assert frozen.reports == []
    assert counts["rescued", "worker_frozen"] == 1 + (state is None)
    assert counts["held", "worker_frozen"] == (status == "held")
    row = host.row(each)
    assert (row["status"], row["was_uncertain"], row["locked_by"]) == (status, state == ON_THE_WIRE, None)
    assert row["attempt_count"] == each.attempt_number - (state is None)
    assert (row["publish_due_at"] is not None) == (status == "pending")
    assert [one["worker"] for one in host.books.attempts(each.email_id)] == ["slot-1:relay"] * (state is not None)
    if state == ON_THE_WIRE:
        assert (row["error_type"], host.outcomes(each)) == ("outcome_unknown", [["uncertain"]])
    keys = host.books.keys([each.email_id, unsent.email_id])
    assert len(await other_store.lease(keys, 60)) == 1 + (status == "pending")


async def test_a_result_that_postgresql_refuses_does_not_end_the_relay(frozen: Frozen) -> None:
    refused, unsent = await frozen.host.lease(2)
    answered(Rejected(Reason.REFUSED))(frozen.ledger, refused)
    frozen.run_out(refused, unsent)

    with constraint(frozen.host.books.connection, "outcome <> 'rejected'"):
        await frozen.look(50)

    assert len(set(frozen.reports)) == 1
    assert frozen.host.statuses(refused, unsent) == ["sending", "pending"]


async def test_released_emails_can_no_longer_be_sent(frozen: Frozen) -> None:
    asked_at = steady_clock()
    (each,) = await frozen.host.lease()
    frozen.run_out(each)

    await frozen.look()

    # The test now does what the woken worker does: it writes its slot, and checks its lease.
    on_the_wire(frozen.ledger, each)
    assert frozen.ledger.voided_at >= asked_at
    # Leases that the worker takes or renews from now on are valid.
    assert frozen.ledger.voided_at < steady_clock()


async def test_valid_leases_and_those_of_other_workers_are_not_touched_or_voided(
    frozen: Frozen, other_store: LeaseStore
) -> None:
    await frozen.host.lease()
    frozen.run_out(*await frozen.host.lease(by=other_store))
    before = frozen.host.books.rows()

    await frozen.look()

    assert frozen.host.books.rows() == before
    assert frozen.ledger.voided_at == 0.0


async def test_emails_on_the_wire_are_left_to_their_worker_for_a_while(frozen: Frozen) -> None:
    (each,) = await frozen.host.lease()
    on_the_wire(frozen.ledger, each)
    frozen.run_out(each)

    await frozen.look(60)

    assert frozen.host.statuses(each) == ["sending"]
    assert await frozen.host.worker.record([result(each, Status.SENT)]) == {each.email_id}


@pytest.mark.parametrize("policy", OnUncertain)
async def test_a_woken_workers_late_answer_counts_only_as_an_acceptance(frozen: Frozen, policy: OnUncertain) -> None:
    host = frozen.host
    accepted, rejected = await host.lease(2, on_uncertain=policy)
    for each in (accepted, rejected):
        on_the_wire(frozen.ledger, each)
    frozen.run_out(accepted, rejected)
    await frozen.look()
    judged = host.row(rejected)

    ours = await host.worker.record([result(accepted, Status.SENT), result(rejected, Status.FAILED)])

    assert ours == {accepted.email_id}
    assert host.row(rejected) == judged
    row = host.row(accepted)
    assert (row["status"], row["publish_due_at"], row["dead_letter_due_at"]) == ("sent", None, None)
    assert host.outcomes(accepted) == [["uncertain", "accepted"]]


async def test_a_worker_that_renews_during_the_settlement_keeps_its_lease(frozen: Frozen) -> None:
    books = frozen.host.books
    unnamed, wire = await frozen.host.lease(2)
    on_the_wire(frozen.ledger, wire)
    frozen.run_out(unnamed, wire)
    with books.locked(unnamed.email_id) as person:
        # The relay has read the expired leases, and waits for the row lock. The renewal commits before the relay gets
        # the lock.
        looking = asyncio.create_task(frozen.look())
        await until(lambda: books.waiting_for_a_lock(RELAY))
        person.execute("update email_log set locked_until = clock_timestamp() + interval '1 minute'")
        person.commit()
        await looking

    assert [(row["status"], row["lease_token"]) for row in books.rows()] == [("sending", 1)] * 2
    # The relay records no attempt for a lease that it did not settle.
    assert books.count("every_attempt") == 0


async def test_the_leading_relay_leaves_leases_of_its_own_host_to_ledgers_and_waits_for_those_of_others(
    host: Host, other_store: LeaseStore
) -> None:
    (here,) = await host.lease()
    young, old = await host.lease(2, by=other_store)
    for each, ago in ((here, "1 year"), (old, "1 year"), (young, "1 second")):
        ended = "update email_log set locked_until = clock_timestamp() - %s::interval where email_id = %s"
        host.books.connection.execute(ended, [ago, each.email_id])
    async with await connect_async(host.url, name="leader") as session:
        outbox = Outbox(session)
        found = await outbox.find_expiring([WORKER])
        rescued = await outbox.recover_expired(OnUncertain.HOLD, 3, found, grace_seconds=60)

    assert [email.email_id for email in rescued] == [old.email_id]
    assert host.row(old)["was_uncertain"]


async def test_an_unreadable_ledger_is_reported_and_no_lease_is_taken(frozen: Frozen) -> None:
    (each,) = await frozen.host.lease()
    frozen.run_out(each)
    os.truncate(frozen.ledger.path, 700)

    await frozen.look()

    assert set(frozen.reports) == {"the file is truncated"}
    assert frozen.host.statuses(each) == ["sending"]


async def test_a_jump_of_postgresqls_clock_takes_no_lease_that_is_renewed(clock: SteeredClock, frozen: Frozen) -> None:
    wire, unsent = await frozen.host.lease(2)
    on_the_wire(frozen.ledger, wire)
    await frozen.look(5)
    clock.set(3600)

    for _ in range(3):
        await frozen.look(40)
        await frozen.host.worker.renew({each.email_id: each.token for each in (wire, unsent)}, 60)

    assert frozen.host.books.statuses() == {"sending": 2}
    assert frozen.ledger.voided_at == 0.0
