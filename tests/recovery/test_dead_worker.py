"""After a worker was killed, the relay immediately records the answers in the worker's ledger and releases the worker's
other leases. The relay does so only once."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, PartialDelivery, Reason, Rejected, Uncertain
from dispatcher.domain.status import Status
from dispatcher.errors import StoreUnavailable
from dispatcher.host.ledger import Ledger
from dispatcher.recovery.ledgers import RETRY_SECONDS, LedgerRecovery
from dispatcher.store.connections import Pool, make_pool
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry import metrics
from tests.recovery.lost_workers import (
    BEGAN,
    RELAY,
    SLOT,
    STARTED_AT,
    WORKER,
    Host,
    Step,
    answered,
    on_the_wire,
    rendering,
    settings,
    unsent,
)
from tests.recovery.tally import counted
from tests.store.books import frozen_sessions
from tests.store.damage import refused
from tests.store.fixtures import DATABASE_ID
from tests.store.results import result
from tests.waiting import until, until_answer

BUSY = Deferred(Reason.SERVER_ERROR, "busy", "503")
THROTTLED = Deferred(Reason.THROTTLED, "slow down", "451 4.7.1", 5.0)
NEXT_DAY = Deferred(Reason.THROTTLED, "come back tomorrow", "451 4.7.1", 86_400.0)
REFUSED_FOR_A_DAY = Deferred(Reason.REFUSED, "come back tomorrow", "451 4.7.1", 86_400.0)
NO_USER = Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1")
LAST: dict[str, Any] = {"attempt_count": 2}
"""The next attempt is the last one."""
TEST: dict[str, Any] = {"channel": "test"}
PINNED: dict[str, Any] = {"provider": "resend", "pinned_at": BEGAN, "crash_count": 2}


@pytest.mark.parametrize(
    ("step", "before", "status", "reason", "counts"),
    [
        pytest.param(unsent, {}, "pending", None, (0, 0), id="unsent"),
        pytest.param(rendering, {"crash_count": 1}, "pending", "worker_crashed", (0, 2), id="rendering, second crash"),
        pytest.param(rendering, {"crash_count": 2}, "failed", "worker_crashed", (0, 3), id="rendering, third crash"),
        pytest.param(rendering, {"crash_count": 2, **TEST}, "failed", "worker_crashed", (0, 3), id="rendering a test"),
        pytest.param(rendering, PINNED, "held", "worker_crashed", (0, 3), id="rendering what a provider may have"),
        pytest.param(on_the_wire, {}, "held", "outcome_unknown", (1, 0), id="on the wire"),
        pytest.param(on_the_wire, {"on_uncertain": "hold"}, "held", "outcome_unknown", (1, 0), id="to be held"),
        pytest.param(on_the_wire, {"on_uncertain": "resend"}, "pending", "outcome_unknown", (1, 0), id="to be resent"),
        pytest.param(on_the_wire, {"on_uncertain": "resend", **LAST}, "held", "outcome_unknown", (3, 0), id="last"),
        pytest.param(Accepted("queued as 7", "250 ok"), {}, "sent", None, (1, 0), id="accepted"),
        pytest.param(THROTTLED, {}, "pending", "throttled", (1, 0), id="throttled"),
        pytest.param(NEXT_DAY, {}, "pending", "throttled", (1, 0), id="throttled for a day"),
        pytest.param(REFUSED_FOR_A_DAY, {}, "failed", "refused", (1, 0), id="refused for a day"),
        pytest.param(BUSY, LAST, "failed", "server_error", (3, 0), id="last deferral"),
        pytest.param(NO_USER, {}, "failed", "rejected_recipient", (1, 0), id="rejected"),
        pytest.param(Uncertain("half an answer", "502"), {}, "held", "outcome_unknown", (1, 0), id="uncertain"),
    ],
)
async def test_an_email_is_settled_by_its_last_step_in_the_ledger(
    host: Host,
    other_store: LeaseStore,
    step: Step | Outcome,
    before: dict[str, Any],
    status: str,
    reason: str | None,
    counts: tuple[int, int],
) -> None:
    (each,) = await host.lease(**before)
    host.die((each, step if callable(step) else answered(step)))

    await host.settle()

    row, attempts = host.row(each), host.books.attempts(each.email_id)
    assert (row["status"], row["error_type"], row["locked_by"]) == (status, reason, None)
    assert (row["attempt_count"], row["crash_count"]) == counts
    assert (row["publish_due_at"] is not None) == (status == "pending")
    assert (row["dead_letter_due_at"] is not None) == (status in ("failed", "held") and row["channel"] != "test")
    assert (row["provider_message_id"] == "queued as 7") == (status == "sent")
    outcome = "uncertain" if step is on_the_wire else type(step).__name__.lower()
    assert host.books.hourly() == ({} if step in (unsent, rendering) else {outcome: 1})
    told = [(one["outcome"], one["worker"], one["attempt_number"], one["provider"]) for one in attempts]
    assert told == ([] if step in (unsent, rendering) else [(outcome, WORKER, each.attempt_number, "smtp")])
    if not callable(step):
        assert [(one["error"], one["finished_at"].timestamp()) for one in attempts] == [(step.detail, STARTED_AT + 1)]
    assert host.ledgers() == []
    if status == "pending":  # the dead worker's token is no longer valid
        assert await other_store.record([result(each, Status.FAILED)]) == set()


async def test_emails_in_mixed_states_are_settled_and_counted_once_and_those_of_other_workers_stay(
    host: Host, other_store: LeaseStore
) -> None:
    (resent,) = await host.lease(on_uncertain="resend")
    done, refused_for_good, wire, *waiting = await host.lease(6)
    (theirs,) = await host.lease(by=other_store)
    steps = [(resent, on_the_wire), (done, answered(Accepted())), *((each, unsent) for each in waiting)]
    rejected = answered(Rejected(Reason.INVALID_CONTENT, "no", "400"))
    host.die(*steps, (refused_for_good, rejected), (wire, on_the_wire))

    meters = {"attempts": metrics.ATTEMPTS, "emails": metrics.EMAILS, "freed": metrics.RECOVERED, "held": metrics.HELD}
    with counted(meters) as counts:
        await host.settle()
        await host.settle()

    statuses = ["pending", "sent", "failed", "held", *["pending"] * 3]
    assert host.statuses(resent, done, refused_for_good, wire, *waiting) == statuses
    assert (host.row(theirs)["status"], host.row(theirs)["locked_by"]) == ("sending", "worker-2")
    assert counts == Counter(
        {
            ("attempts", "smtp", "accepted", "none"): 1,
            ("attempts", "smtp", "rejected", "invalid_content"): 1,
            ("attempts", "smtp", "uncertain", "outcome_unknown"): 2,
            ("emails", "smtp", "accepted"): 1,
            ("emails", "smtp", "rejected"): 1,
            ("emails", "smtp", "uncertain"): 1,
            ("freed", "worker_died"): 3,
            ("held", "worker_died"): 1,
        }
    )


KEY_HOURS = 23.0
"""How long the dispatcher relies on an idempotency key of Resend."""
KEYED = {"DISPATCHER_PROVIDERS": "resend", "RESEND_API_KEY": "re_any"}


@pytest.mark.parametrize(
    ("outcome", "hours_ago", "pinned_hours_ago", "status", "is_pinned"),
    [
        (None, 0.0, None, "pending", True),
        (None, KEY_HOURS + 0.1, None, "held", False),
        (Uncertain("no answer"), 0.0, None, "pending", True),
        (BUSY, 0.0, None, "pending", False),
        (None, 0.0, KEY_HOURS - 0.1, "pending", True),
        (None, 0.0, KEY_HOURS + 0.1, "held", False),
        (BUSY, 0.0, 1.0, "pending", True),
        (Rejected(Reason.INVALID_CONTENT, "no", "422"), 0.0, 1.0, "held", False),
        (Accepted("id-1"), 0.0, KEY_HOURS + 0.1, "sent", False),
    ],
    ids=str,
)
async def test_an_email_that_may_be_at_a_provider_with_keys_is_pinned_while_its_key_lives(
    host: Host, outcome: Outcome | None, hours_ago: float, pinned_hours_ago: float | None, status: str, is_pinned: bool
) -> None:
    now = datetime.now(UTC)
    pinned_at = None if pinned_hours_ago is None else now - timedelta(hours=pinned_hours_ago)
    (each,) = await host.lease(provider="resend", pinned_at=pinned_at)
    began_at = now.timestamp() - hours_ago * 3600
    sent = partial(on_the_wire, provider="resend", started_at=began_at)
    host.die((each, sent if outcome is None else answered(outcome, "resend", began_at)))

    await host.settle(**KEYED)

    row = host.row(each)
    assert (row["status"], row["pinned_at"] is not None) == (status, is_pinned)
    if is_pinned:
        expected = (pinned_at or now).timestamp()
        assert (row["provider"], row["pinned_at"].timestamp()) == ("resend", pytest.approx(expected, abs=1.0))
        assert row["publish_due_at"] is not None


async def test_after_a_partial_delivery_only_the_other_recipients_are_left(host: Host) -> None:
    (each,) = await host.lease(**LAST)  # without the delivery, this attempt would be the last
    delivery = PartialDelivery({1: None, 2: "550 5.1.1", 1000: None})
    host.die((each, answered(Deferred(Reason.RECIPIENT_DEFERRED, "full", "452", partial=delivery))))

    await host.settle()

    row = host.row(each)
    assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
    # The ledger does not contain the refused recipients. They are tried, and refused, again.
    assert row["recipient_outcomes"] == {"1": None, "1000": None}


NO_PROGRESS = PartialDelivery({1: None}, has_progress=False)


@pytest.mark.parametrize(
    ("step", "status", "words"),
    [
        pytest.param(unsent, "pending", "full", id="unsent"),
        pytest.param(on_the_wire, "held", "The worker died while the email was on the wire.", id="on the wire"),
        pytest.param(answered(Accepted("queued as 7", "250 ok")), "sent", "250 ok", id="accepted"),
        pytest.param(
            answered(Deferred(Reason.RECIPIENT_DEFERRED, "full", "452", partial=NO_PROGRESS)),
            "failed",
            "full",
            id="deferred",
        ),
    ],
)
async def test_a_worker_that_dies_after_a_partial_delivery_leaves_the_delivered_recipients_alone(
    host: Host, step: Step, status: str, words: str
) -> None:
    (first,) = await host.lease()
    partial = result(first, Status.SENDING, lease_seconds=600, recipient_outcomes={1: None, 2: "550 5.1.1"})
    await host.worker.record([partial._replace(error="full")])
    assert host.row(first)["attempt_count"] == 2
    host.books.change(first.email_id, attempt_base=-2)  # the second transaction is the last attempt
    host.die((first._replace(attempt_number=2), step))

    await host.settle()

    row = host.row(first)
    assert (row["status"], row["last_error"]) == (status, words)
    assert row["recipient_outcomes"] == {"1": None, "2": "550 5.1.1"}
    if status == "failed":
        assert row["error_type"] == Reason.PARTLY_DELIVERED


@pytest.mark.parametrize(
    ("hosts", "row", "is_recovered", "status"),
    [
        ("0", {"redeliver_seconds": 3600}, False, "waiting"),
        ("3600", {"max_attempts": 5}, False, "pending"),
        ("0", {}, True, "failed"),
        ("3600", {}, True, "waiting"),
    ],
    ids=str,
)
async def test_a_last_deferral_waits_for_a_redelivery_if_redelivery_is_on(
    host: Host, hosts: str, row: dict[str, Any], is_recovered: bool, status: str
) -> None:
    (each,) = await host.lease(**LAST, **row)
    host.die((each, answered(BUSY)))
    if is_recovered:  # by another host, to which this host seemed lost
        await host.recover_elsewhere()
        assert host.statuses(each) == ["held"]

    await host.settle(DISPATCHER_REDELIVER_FOR=hosts)

    found = host.row(each)
    assert (found["status"], found["redelivery_count"]) == (status, int(status == "waiting"))
    assert (found["dead_letter_due_at"] is not None) == (status == "failed")


async def test_results_that_the_worker_had_recorded_are_not_recorded_again(host: Host) -> None:
    accepted, rejected = await host.lease(2)
    recorded = [result(accepted, Status.SENT, started_at=BEGAN), result(rejected, Status.FAILED, started_at=BEGAN)]
    await host.worker.record(recorded)
    host.die((accepted, answered(Accepted())), (rejected, on_the_wire))
    rows = host.books.rows()

    await host.settle()

    assert host.books.rows() == rows
    assert host.books.hourly() == {"accepted": 1, "rejected": 1}
    assert host.books.count("every_attempt") == 2


async def test_a_recorded_deferral_whose_retry_was_pending_is_released(host: Host) -> None:
    still_named, cleared = leases = await host.lease(2)
    await host.worker.record(
        [result(each, Status.SENDING, error_type="throttled", started_at=BEGAN) for each in (still_named, cleared)]
    )
    host.die((still_named, answered(THROTTLED)))

    await host.settle()

    for each in leases:
        row = host.row(each)
        assert (row["status"], row["attempt_count"]) == ("pending", 1)
        assert row["publish_due_at"] is not None
        assert len(host.outcomes(each)[0]) == 1


async def test_an_email_that_another_worker_has_leased_since_is_changed_only_by_an_acceptance(
    host: Host, other_store: LeaseStore
) -> None:
    lost, suspect, proven = leases = await host.lease(3)
    for each in leases:
        host.books.change(each.email_id, status="pending", locked_until="epoch", lease_token=each.token + 1)
    await other_store.lease(host.books.keys([each.email_id for each in leases]), 600)
    host.die((lost, on_the_wire), (suspect, rendering), (proven, answered(Accepted("late"))))
    before = [host.row(each) for each in (lost, suspect)]

    await host.settle()

    assert [host.row(each) for each in (lost, suspect)] == before
    assert host.outcomes(lost, suspect) == [["uncertain"], []]
    assert (host.row(proven)["status"], host.row(proven)["provider_message_id"]) == ("sent", "late")


async def test_a_crash_is_not_counted_for_a_suspect_that_its_worker_has_leased_again(host: Host) -> None:
    (suspect,) = await host.lease()
    await host.worker.release({suspect.email_id: suspect.token})
    await host.worker.lease(host.books.keys([suspect.email_id]), 600)
    host.die((suspect, rendering))

    await host.settle()

    assert (host.row(suspect)["crash_count"], host.row(suspect)["lease_token"]) == (0, 2)


async def test_the_ledger_of_a_live_worker_is_not_settled(host: Host) -> None:
    (each,) = await host.lease()
    living = Ledger(host.run_dir, worker=WORKER, slot=SLOT, slots=1)
    living.set_database(DATABASE_ID)
    on_the_wire(living, each)

    await host.settle()

    assert host.statuses(each) == ["sending"]
    assert host.ledgers() == [living.path.name]


async def test_other_files_are_kept_and_do_not_stop_the_settlement_of_ledgers(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    (each,) = await host.lease()
    host.die((each, answered(Accepted())))
    (host.run_dir / "a.ledger").write_bytes(b"EDLEDGER" + bytes(5000))
    (host.run_dir / "b.ledger").mkdir()
    (host.run_dir / "c.ledger").symlink_to("c.ledger")
    os.mkfifo(host.run_dir / "d.ledger")
    (host.run_dir / "run.lock").touch()

    async with host.recovery() as recovery:
        for _ in range(2):
            await recovery.run_once()

    assert host.statuses(each) == ["sent"]
    assert host.ledgers() == ["a.ledger", "b.ledger", "c.ledger", "d.ledger", "run.lock"]
    # Each unreadable file is reported once.
    assert capsys.readouterr().out.count("ledger.unreadable") == 4


async def test_a_refused_result_loses_the_providers_text_and_affects_no_other_email_or_ledger(host: Host) -> None:
    first, refused, last, fine = await host.lease(4)
    texts = ((first, "no"), (refused, "a NUL \0 inside"), (last, "no"))
    host.die(*((each, answered(Rejected(Reason.REFUSED, text))) for each, text in texts))
    (path,) = host.run_dir.iterdir()
    path.rename(host.run_dir / "a.ledger")
    host.die((fine, answered(Accepted())))

    await host.settle()

    assert host.statuses(first, refused, last, fine) == ["failed", "failed", "failed", "sent"]
    assert [host.row(each)["last_error"] for each in (first, refused, last)] == ["no", None, "no"]
    assert host.ledgers() == []


async def test_a_lease_that_postgresql_refuses_to_release_does_not_affect_the_workers_others(host: Host) -> None:
    leases = await host.lease(4)
    host.die(*((each, unsent) for each in leases))

    with refused(host.books.connection, leases[0].email_id, "new.status = 'pending'"):
        await host.settle()

    assert host.statuses(*leases) == ["sending", "pending", "pending", "pending"]


async def test_a_suspect_whose_crash_cannot_be_counted_is_released_like_the_others(host: Host) -> None:
    suspect, innocent = await host.lease(2)
    host.die((suspect, rendering), (innocent, unsent))

    with refused(host.books.connection, suspect.email_id, "new.crash_count > 0"), counted() as counts:
        await host.settle()

    assert counts == Counter({("rescued", "worker_died"): 2, ("held", "worker_died"): 0})
    assert host.statuses(suspect, innocent) == ["pending", "pending"]
    assert host.ledgers() == []


STEPS: list[Step] = [unsent, rendering, on_the_wire, answered(Accepted()), answered(NO_USER)]


@pytest.mark.parametrize(
    ("written", "is_recovered", "statuses"),
    [
        ({"boot": ""}, False, ["sending", "sending", "held", "sent", "failed"]),
        ({"boot": "00000000-0000-0000-0000-000000000000"}, False, ["sending", "sending", "held", "sent", "failed"]),
        ({"boot": "another"}, True, ["held", "held", "held", "sent", "failed"]),
        ({"database_id": None}, False, ["pending", "pending", "held", "sent", "failed"]),
    ],
    ids=["unknown boot", "after a reboot", "after a reboot and a recovery", "previous format"],
)
async def test_of_a_ledger_from_before_a_reboot_only_the_named_emails_are_settled_and_of_an_older_format_all(
    host: Host, written: dict[str, Any], is_recovered: bool, statuses: list[str]
) -> None:
    leases = await host.lease(len(STEPS))
    host.die(*zip(leases, STEPS, strict=True), **written)
    if is_recovered:
        await host.recover_elsewhere()

    await host.settle()

    assert host.statuses(*leases) == statuses
    assert host.ledgers() == []


def numbers(host: Host) -> set[int]:
    """The pids of the worker's sessions. In this test the pool outlives the worker, and replaces terminated
    sessions."""
    return {row["pid"] for row in host.books.sessions(WORKER)}


async def test_a_running_statement_of_the_dead_worker_is_ended_first(host: Host) -> None:
    email_id = host.books.enqueue_one()
    with host.books.locked(email_id):
        leasing = asyncio.create_task(host.worker.lease(host.books.keys([email_id]), 600))
        await until(lambda: host.books.waiting_for_a_lock(WORKER))
        before = numbers(host)
        host.die()

        await host.settle()

        assert not before & numbers(host)
    with pytest.raises(Exception, match="terminating connection"):
        await leasing
    row = host.books.row(email_id)
    assert (row["status"], row["lease_token"], row["publish_due_at"] is None) == ("pending", 0, False)


async def test_a_running_record_of_the_dead_worker_is_not_recorded_twice(host: Host) -> None:
    (each,) = await host.lease()
    with host.books.locked(each.email_id):
        recording = asyncio.create_task(host.worker.record([result(each, Status.SENT, started_at=BEGAN)]))
        await until(lambda: host.books.waiting_for_a_lock(WORKER))
        before = numbers(host)
        host.die((each, answered(Accepted())))
        settling = asyncio.create_task(host.settle())
        await until(lambda: not before & numbers(host))
    await settling
    with pytest.raises(Exception, match="terminating connection"):
        await recording

    assert host.statuses(each) == ["sent"]
    assert host.outcomes(each) == [["accepted"]]
    assert host.books.hourly() == {"accepted": 1}


async def test_an_interrupted_settlement_runs_again(host: Host) -> None:
    unnamed, done = await host.lease(2)
    host.die((unnamed, unsent), (done, answered(Accepted())))
    with host.books.locked(done.email_id):
        settling = asyncio.create_task(host.settle())
        await until(lambda: host.books.waiting_for_a_lock(RELAY))
        host.books.terminate(RELAY)
        with pytest.raises(StoreUnavailable):
            await settling
    assert len(host.ledgers()) == 1

    await host.settle()

    assert host.ledgers() == []
    assert host.statuses(unnamed, done) == ["pending", "sent"]
    assert host.outcomes(done) == [["accepted"]]


async def test_locked_emails_are_settled_later_and_delay_nothing(host: Host) -> None:
    unnamed, other, wire, done, poison = await host.lease(5)
    steps = [(wire, on_the_wire), (done, answered(Accepted())), (poison, rendering)]
    host.die((unnamed, unsent), (other, unsent), *steps)

    async with host.recovery(0.1) as recovery:
        with host.books.locked(*(each.email_id for each in (unnamed, wire, poison))):
            for _ in range(2):
                await recovery.run_once()
                assert host.statuses(other, done) == ["pending", "sent"]
                assert host.statuses(unnamed, wire, poison) == ["sending"] * 3
                assert len(host.ledgers()) == 1
        await until_answer(lambda: looked(recovery, lambda: host.ledgers() == []))

    assert host.statuses(unnamed, wire, poison) == ["pending", "held", "pending"]
    assert host.row(poison)["crash_count"] == 1
    assert host.outcomes(done, wire) == [["accepted"], ["uncertain"]]


async def test_a_suspect_that_was_locked_while_crashes_were_counted_keeps_its_lease(host: Host) -> None:
    suspect, other = await host.lease(2)
    host.die((suspect, rendering), (other, unsent))

    with host.books.locked(suspect.email_id):
        settling = asyncio.create_task(host.settle())
        # A release of the suspect would wait for the lock, and succeed after its end.
        await until(lambda: settling.done() or host.books.waiting_for_a_lock(RELAY))
    await settling

    assert host.statuses(suspect, other) == ["sending", "pending"]
    await host.settle()
    assert (host.statuses(suspect), host.row(suspect)["crash_count"]) == (["pending"], 1)
    assert host.ledgers() == []


async def looked(recovery: LedgerRecovery, is_done: Callable[[], bool]) -> bool:
    """Runs one round of the recovery; returns whether `is_done` is true afterwards. More than one round may be
    necessary, because autovacuum may lock a table for longer than 0.1 s."""
    await recovery.run_once()
    return is_done()


async def test_a_session_that_does_not_end_delays_only_its_ledger_until_leases_expire(host: Host, pool: Pool) -> None:
    settlement = LedgerRecovery(settings(DISPATCHER_RUN_DIR=str(host.run_dir), DISPATCHER_LEASE_SECONDS="1"), pool)
    unnamed, wire, done = leases = await host.lease(3)
    async with make_pool(host.url, name="host:w1:18:cafe", size=1) as other_pool:
        others = await host.lease(2, by=LeaseStore(other_pool, worker="host:w1:18:cafe", slot="slot-2"))
    host.die((unnamed, unsent), (wire, on_the_wire), (done, answered(Accepted())))
    host.die((others[0], unsent), (others[1], on_the_wire), worker="host:w1:18:cafe")
    with frozen_sessions(host.books, WORKER):
        assert await settlement.run_once() == RETRY_SECONDS

        assert host.statuses(*others) == ["pending", "held"]
        assert host.statuses(*leases) == ["sending"] * 3
        host.books.connection.execute("update email_log set locked_until = '2026-01-01' where status = 'sending'")
        await until_answer(lambda: looked(settlement, lambda: host.books.statuses()["sending"] == 0))
        assert host.statuses(*leases) == ["pending", "held", "sent"]
        assert len(host.ledgers()) == 1

    await until_answer(lambda: looked(settlement, lambda: host.ledgers() == []))
    assert host.statuses(*leases) == ["pending", "held", "sent"]
    assert await settlement.run_once() is None


async def test_a_ledger_of_another_database_is_kept_reported_and_not_settled(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    (theirs,) = await host.lease()
    other = UUID("0d150a7c-0000-4000-8000-00000000000a")
    host.die((theirs, on_the_wire), database_id=other)
    living = Ledger(host.run_dir, worker="host:w1:18:cafe", slot="slot-2", slots=1)
    living.set_database(other)
    before = host.ledgers()

    async with host.recovery() as recovery:
        for _ in range(2):
            await recovery.run_once()
        assert recovery.workers_here == frozenset()

    assert host.ledgers() == before
    assert host.statuses(theirs) == ["sending"]
    assert capsys.readouterr().out.count("ledger.foreign") == 2  # one event for each of the two ledgers


async def test_the_ledger_of_a_dead_worker_corrects_the_recovery_by_another_host(host: Host) -> None:
    unnamed, wire, accepted, deferred, rejected = leases = await host.lease(5)
    steps = [(accepted, answered(Accepted())), (deferred, answered(THROTTLED))]
    host.die((unnamed, unsent), (wire, on_the_wire), (rejected, answered(Rejected(Reason.REFUSED))), *steps)
    await host.recover_elsewhere()
    assert host.books.statuses() == {"held": 5}

    await host.settle()

    found = [host.row(each) for each in leases]
    assert host.statuses(*leases) == ["pending", "held", "sent", "pending", "failed"]
    # An unsent email uses no attempt; a definite refusal uses one.
    assert [row["attempt_count"] - row["attempt_base"] for row in found] == [0, 1, 1, 1, 1]
    assert [row["was_uncertain"] for row in found] == [False, True, True, False, False]
    assert [row["dead_letter_due_at"] is None for row in found] == [True, False, True, True, False]
    audited = host.books.select("select email_id, actor, action from operator_audit")
    assert {row["email_id"] for row in audited} == {each.email_id for each in (unnamed, deferred, rejected)}
    assert {(row["actor"], row["action"]) for row in audited} == {("recovery", "recover")}
    assert host.ledgers() == []


async def test_a_recovered_email_that_an_operator_discarded_or_confirmed_is_changed_only_by_an_acceptance(
    host: Host,
) -> None:
    unnamed, deferred, given_back, accepted, confirmed = leases = await host.lease(5)
    steps = [(unnamed, unsent), (deferred, answered(THROTTLED)), (given_back, unsent), (confirmed, unsent)]
    host.die(*steps, (accepted, answered(Accepted())))
    await host.recover_elsewhere()
    for each in leases:
        host.books.change(each.email_id, dead_letter_due_at=None, dead_letter_discarded_at=BEGAN)
    host.books.change(confirmed.email_id, status="sent", dead_letter_discarded_at=None)

    await host.worker.release({each.email_id: each.token for each in (given_back, confirmed)})
    await host.settle()

    assert host.statuses(*leases) == ["held", "held", "held", "sent", "sent"]
    assert host.row(unnamed)["dead_letter_discarded_at"] == BEGAN
    assert host.ledgers() == []


@pytest.mark.parametrize(
    ("step", "boot", "is_recovered", "status"),
    [
        pytest.param(answered(Accepted()), "an earlier start", False, "sent", id="from before the last boot"),
        pytest.param(unsent, None, True, "pending", id="after a recovery"),
    ],
)
async def test_a_ledger_is_kept_until_its_locked_emails_can_be_recorded_or_their_recovery_undone(
    host: Host, step: Step, boot: str | None, is_recovered: bool, status: str
) -> None:
    (each,) = await host.lease()
    host.die((each, step), boot=boot)
    if is_recovered:
        await host.recover_elsewhere()

    async with host.recovery(0.1) as recovery:
        with host.books.locked(each.email_id), counted() as counts:
            await recovery.run_once()
            assert len(host.ledgers()) == 1
        assert counts == Counter()
        await until_answer(lambda: looked(recovery, lambda: host.ledgers() == []))

    assert host.statuses(each) == [status]
