"""After a worker was killed, the relay immediately records the answers in the worker's ledger and releases the worker's
other leases. The relay does so only once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

from dispatcher.config import Settings, load
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, PartialDelivery, Reason, Rejected, Uncertain
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.errors import StoreUnavailable
from dispatcher.host.ledger import Ledger
from dispatcher.host.services import Periodic
from dispatcher.recovery.ledgers import LedgerRecovery
from dispatcher.store.connections import Pool, connect_async, make_pool
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry import metrics
from tests.recovery.lost_workers import BEGAN, WORKER, Step, answered, die, on_the_wire, rendering, unsent
from tests.recovery.tally import counted
from tests.store.books import Books, frozen_sessions
from tests.store.damage import refused
from tests.store.fixtures import DATABASE_ID
from tests.store.results import result
from tests.waiting import until, until_answer


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The host's run directory."""
    return tmp_path / "run"


@pytest.fixture
async def worker_pool(tables_url: str) -> AsyncIterator[Pool]:
    """The worker's pool of PostgreSQL sessions. The test's process opens the sessions, so they can outlive the
    worker."""
    opened = make_pool(tables_url, name=WORKER, size=2)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def worker(worker_pool: Pool) -> LeaseStore:
    """The worker's lease store."""
    return LeaseStore(worker_pool, worker=WORKER, slot="slot-1")


@pytest.fixture
async def settlement(tables_url: str, run_dir: Path) -> AsyncIterator[LedgerRecovery]:
    """The relay's recovery of the ledgers in this run directory."""
    opened = make_pool(tables_url, name="dispatcher relay settlement", size=1)
    await opened.open()
    yield LedgerRecovery(settings(run_dir), opened)
    await opened.close()


def settings(run_dir: Path, **given: str) -> Settings:
    return load({"DISPATCHER_RUN_DIR": str(run_dir), "DISPATCHER_MAX_ATTEMPTS": "3", **given})


async def lease(worker: LeaseStore, books: Books, count: int = 1, **fields: object) -> list[Lease]:
    leases = await worker.lease(books.keys(books.enqueue(count, **fields)), 600)
    return sorted(leases, key=lambda each: each.email_id)


def only_file(run_dir: Path) -> Path:
    (path,) = run_dir.iterdir()
    return path


def left_over(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


async def test_unsent_emails_are_due_again_at_once_and_use_no_attempt(
    settlement: LedgerRecovery, worker: LeaseStore, other_store: LeaseStore, books: Books, run_dir: Path
) -> None:
    leases = await lease(worker, books, 3)
    die(run_dir, [(each, unsent) for each in leases])

    await settlement.run_once()

    for each in leases:
        row = books.row(each.email_id)
        assert (row["status"], row["attempt_count"], row["locked_by"]) == ("pending", 0, None)
        assert row["publish_due_at"] is not None
        assert books.attempts(each.email_id) == []
    assert left_over(run_dir) == []
    # The dead worker's token is no longer valid.
    assert await other_store.record([result(leases[0], Status.FAILED)]) == set()


@pytest.mark.parametrize(
    ("policy", "status"), [(None, "held"), (OnUncertain.HOLD, "held"), (OnUncertain.RESEND, "pending")]
)
async def test_emails_on_the_wire_are_uncertain_and_judged_by_policy(
    settlement: LedgerRecovery,
    worker: LeaseStore,
    books: Books,
    run_dir: Path,
    policy: OnUncertain | None,
    status: str,
) -> None:
    each, waiting = await lease(worker, books, 2, on_uncertain=policy)
    die(run_dir, [(each, on_the_wire), (waiting, unsent)])

    with counted() as counts:
        await settlement.run_once()

    assert counts == Counter({("rescued", "worker_died"): 1, ("held", "worker_died"): int(status == "held")})
    row = books.row(each.email_id)
    assert (row["status"], row["error_type"], row["attempt_count"]) == (status, "outcome_unknown", 1)
    assert (row["dead_letter_due_at"] is None, row["publish_due_at"] is None) == (status == "pending", status == "held")
    (attempt,) = books.attempts(each.email_id)
    assert (attempt["outcome"], attempt["worker"], attempt["attempt_number"]) == ("uncertain", WORKER, 1)
    assert books.hourly() == {"uncertain": 1}


async def test_the_attempts_that_a_dead_worker_did_not_record_are_counted_once(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    done, refused_for_good, wire, waiting = await lease(worker, books, 4)
    rejected = Rejected(Reason.INVALID_CONTENT, "no", "400")
    die(run_dir, [(done, answered(Accepted())), (refused_for_good, answered(rejected)), (wire, on_the_wire),
                  (waiting, unsent)])  # fmt: skip

    with counted({"attempts": metrics.ATTEMPTS, "emails": metrics.EMAILS}) as counts:
        await settlement.run_once()
        await settlement.run_once()

    (provider,) = {place[1] for place in counts}
    assert counts == Counter(
        {
            ("attempts", provider, "accepted", "none"): 1,
            ("attempts", provider, "rejected", "invalid_content"): 1,
            ("attempts", provider, "uncertain", "outcome_unknown"): 1,
            ("emails", provider, "accepted"): 1,
            ("emails", provider, "rejected"): 1,
            ("emails", provider, "uncertain"): 1,
        }
    )


KEY_HOURS = 23.0
"""How long the dispatcher relies on an idempotency key of Resend."""


@pytest.fixture
async def keyed(tables_url: str, run_dir: Path) -> AsyncIterator[LedgerRecovery]:
    """As `settlement`, with a provider that has idempotency keys."""
    opened = make_pool(tables_url, name="dispatcher relay settlement", size=1)
    await opened.open()
    yield LedgerRecovery(settings(run_dir, DISPATCHER_PROVIDERS="resend", RESEND_API_KEY="re_any"), opened)
    await opened.close()


@pytest.mark.parametrize(
    ("outcome", "hours_ago", "pinned_hours_ago", "status", "is_pinned"),
    [
        (None, 0.0, None, "pending", True),
        (None, KEY_HOURS + 0.1, None, "held", False),
        (Uncertain("no answer"), 0.0, None, "pending", True),
        (Deferred(Reason.SERVER_ERROR, "busy", "503"), 0.0, None, "pending", False),
        (None, 0.0, KEY_HOURS - 0.1, "pending", True),
        (None, 0.0, KEY_HOURS + 0.1, "held", False),
        (Deferred(Reason.SERVER_ERROR, "busy", "503"), 0.0, 1.0, "pending", True),
        (Rejected(Reason.INVALID_CONTENT, "no", "422"), 0.0, 1.0, "held", False),
        (Accepted("id-1"), 0.0, KEY_HOURS + 0.1, "sent", False),
    ],
    ids=str,
)
async def test_an_email_that_may_be_at_a_provider_with_keys_is_pinned_while_its_key_lives(
    keyed: LedgerRecovery,
    worker: LeaseStore,
    books: Books,
    run_dir: Path,
    outcome: Outcome | None,
    hours_ago: float,
    pinned_hours_ago: float | None,
    status: str,
    is_pinned: bool,
) -> None:
    email_id = books.enqueue_one()
    now = datetime.now(UTC)
    pinned_at = None if pinned_hours_ago is None else now - timedelta(hours=pinned_hours_ago)
    books.change(email_id, provider="resend", pinned_at=pinned_at)
    (each,) = await worker.lease(books.keys([email_id]), 600)
    began_at = now.timestamp() - hours_ago * 3600
    sent = partial(on_the_wire, provider="resend", started_at=began_at)
    die(run_dir, [(each, sent if outcome is None else answered(outcome, "resend", began_at))])

    await keyed.run_once()

    row = books.row(email_id)
    assert (row["status"], row["pinned_at"] is not None) == (status, is_pinned)
    if is_pinned:
        expected = (pinned_at or now).timestamp()
        assert (row["provider"], row["pinned_at"].timestamp()) == ("resend", pytest.approx(expected, abs=1.0))
        assert row["publish_due_at"] is not None


async def test_a_pinned_email_that_crashes_every_worker_is_held(
    keyed: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, provider="resend", pinned_at=datetime.now(UTC), crash_count=2)
    (each,) = await worker.lease(books.keys([email_id]), 600)
    die(run_dir, [(each, rendering)])

    await keyed.run_once()

    assert books.status(email_id) == "held"


async def test_a_last_attempt_on_the_wire_is_held_even_if_it_may_be_resent(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    email_id = books.enqueue_one(on_uncertain="resend")
    books.change(email_id, attempt_count=2)
    (each,) = await worker.lease(books.keys([email_id]), 600)
    die(run_dir, [(each, on_the_wire)])

    await settlement.run_once()

    assert books.status(email_id) == "held"


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        (Accepted("queued as 7", "250 ok"), "sent", None),
        (Deferred(Reason.THROTTLED, "slow down", "451 4.7.1", 5.0), "pending", "throttled"),
        (Deferred(Reason.THROTTLED, "come back tomorrow", "451 4.7.1", 86_400.0), "pending", "throttled"),
        (Deferred(Reason.REFUSED, "come back tomorrow", "451 4.7.1", 86_400.0), "failed", "refused"),
        (Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1"), "failed", "rejected_recipient"),
        (Uncertain("half an answer", "502"), "held", "outcome_unknown"),
    ],
    ids=str,
)
async def test_answered_emails_are_recorded_with_their_answer(
    settlement: LedgerRecovery,
    worker: LeaseStore,
    books: Books,
    run_dir: Path,
    outcome: Outcome,
    status: str,
    reason: str | None,
) -> None:
    (each,) = await lease(worker, books)
    die(run_dir, [(each, answered(outcome))])

    await settlement.run_once()

    row = books.row(each.email_id)
    assert (row["status"], row["error_type"], row["attempt_count"]) == (status, reason, 1)
    assert row["locked_by"] is None
    assert (row["provider_message_id"] == "queued as 7") == (status == "sent")
    (attempt,) = books.attempts(each.email_id)
    assert attempt["finished_at"].timestamp() == 1_790_000_001.0
    assert (attempt["error"], attempt["provider"]) == (outcome.detail, "smtp")
    assert books.hourly() == {type(outcome).__name__.lower(): 1}


PARTIAL = Deferred(
    Reason.RECIPIENT_DEFERRED, "full", "452", partial=PartialDelivery({1: None, 2: "550 5.1.1", 1000: None})
)


async def test_after_a_partial_delivery_only_the_other_recipients_are_left(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, attempt_count=2)  # without the delivery, this attempt would be the last
    (each,) = await worker.lease(books.keys([email_id]), 600)
    die(run_dir, [(each, answered(PARTIAL))])

    await settlement.run_once()

    row = books.row(email_id)
    assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
    # The ledger does not contain the refused recipients. They are tried, and refused, again.
    assert row["recipient_outcomes"] == {"1": None, "1000": None}


@pytest.mark.parametrize(
    ("step", "status", "words"),
    [
        (unsent, "pending", "full"),
        (on_the_wire, "held", "The worker died while the email was on the wire."),
        (answered(Accepted("queued as 7", "250 ok")), "sent", "250 ok"),
        (
            answered(
                Deferred(
                    Reason.RECIPIENT_DEFERRED, "full", "452", partial=PartialDelivery({1: None}, has_progress=False)
                )
            ),
            "failed",
            "full",
        ),
    ],
    ids=["unsent", "on the wire", "accepted", "deferred"],
)
async def test_a_worker_that_dies_after_a_partial_delivery_leaves_the_delivered_recipients_alone(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, step: Step, status: str, words: str
) -> None:
    (first,) = await lease(worker, books)
    partial = result(first, Status.SENDING, lease_seconds=600, recipient_outcomes={1: None, 2: "550 5.1.1"})
    await worker.record([partial._replace(error="full")])
    assert books.row(first.email_id)["attempt_count"] == 2
    books.change(first.email_id, attempt_base=-2)  # the second transaction is the last attempt
    die(run_dir, [(first._replace(attempt_number=2), step)])

    await settlement.run_once()

    row = books.row(first.email_id)
    assert (row["status"], row["last_error"]) == (status, words)
    assert row["recipient_outcomes"] == {"1": None, "2": "550 5.1.1"}
    if status == "failed":
        assert row["error_type"] == Reason.PARTLY_DELIVERED


async def test_a_deferral_that_was_the_last_attempt_fails(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, attempt_count=2)
    (each,) = await worker.lease(books.keys([email_id]), 600)
    die(run_dir, [(each, answered(Deferred(Reason.SERVER_ERROR)))])

    await settlement.run_once()

    assert books.status(email_id) == "failed"


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
@pytest.mark.parametrize("is_recovered", [False, True])
async def test_a_last_deferral_waits_for_a_redelivery_if_redelivery_is_on(
    worker: LeaseStore,
    worker_pool: Pool,
    books: Books,
    tables_url: str,
    run_dir: Path,
    host: str,
    row: dict[str, object],
    status: str,
    is_recovered: bool,
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, attempt_count=2, **row)
    (each,) = await worker.lease(books.keys([email_id]), 600)
    die(run_dir, [(each, answered(Deferred(Reason.SERVER_ERROR)))])
    async with await connect_async(tables_url, name="leader") as leader:
        if is_recovered:  # by another host, to which this host seemed lost
            books.change(email_id, locked_until=datetime(2026, 1, 1, tzinfo=UTC))
            outbox = Outbox(leader)
            await outbox.recover_expired(OnUncertain.HOLD, 3, await outbox.find_expiring())
            assert books.status(email_id) == "held"
    relay = make_pool(tables_url, name="dispatcher relay settlement", size=1)
    await relay.open()

    await LedgerRecovery(settings(run_dir, DISPATCHER_REDELIVER_FOR=host), relay).run_once()
    await relay.close()

    found = books.row(email_id)
    assert (found["status"], found["redelivery_count"]) == (status, int(status == "waiting"))
    assert (found["dead_letter_due_at"] is not None) == (status == "failed")


async def test_a_full_window_in_mixed_states(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    leases = await lease(worker, books, 60)
    steps: list[Step] = [unsent, on_the_wire, answered(Accepted()), answered(Rejected(Reason.REFUSED))]
    die(run_dir, [(each, steps[number % 4]) for number, each in enumerate(leases)])

    await settlement.run_once()

    assert books.statuses() == {"pending": 15, "held": 15, "sent": 15, "failed": 15}
    assert books.hourly() == {"uncertain": 15, "accepted": 15, "rejected": 15}


async def test_a_second_settlement_of_the_same_ledger_is_harmless(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tmp_path: Path
) -> None:
    leases = await lease(worker, books, 4)
    steps: list[Step] = [unsent, on_the_wire, answered(Accepted()), answered(Deferred(Reason.THROTTLED))]
    die(run_dir, list(zip(leases, steps, strict=True)))
    path = only_file(run_dir)
    kept = tmp_path / "kept"
    kept.hardlink_to(path)  # the relay would refuse a copy
    await settlement.run_once()
    rows, attempts = books.rows(), books.count("every_attempt")

    kept.rename(path)
    await settlement.run_once()

    assert books.rows() == rows
    assert books.count("every_attempt") == attempts == 3
    assert left_over(run_dir) == []


async def test_results_that_the_worker_had_recorded_are_not_recorded_again(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    accepted, rejected = await lease(worker, books, 2)
    await worker.record(
        [result(accepted, Status.SENT, started_at=BEGAN), result(rejected, Status.FAILED, started_at=BEGAN)]
    )
    die(run_dir, [(accepted, answered(Accepted())), (rejected, on_the_wire)])
    rows = books.rows()

    await settlement.run_once()

    assert books.rows() == rows
    assert books.hourly() == {"accepted": 1, "rejected": 1}
    assert books.count("every_attempt") == 2


async def test_a_recorded_deferral_whose_retry_was_pending_is_released(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    still_named, cleared = await lease(worker, books, 2)
    deferrals = [
        result(each, Status.SENDING, error_type="throttled", started_at=BEGAN) for each in (still_named, cleared)
    ]
    await worker.record(deferrals)
    die(run_dir, [(still_named, answered(Deferred(Reason.THROTTLED)))])

    await settlement.run_once()

    for each in (still_named, cleared):
        row = books.row(each.email_id)
        assert (row["status"], row["attempt_count"]) == ("pending", 1)
        assert row["publish_due_at"] is not None
        assert len(books.attempts(each.email_id)) == 1


async def test_another_workers_leases_are_not_touched(
    settlement: LedgerRecovery, worker: LeaseStore, other_store: LeaseStore, books: Books, run_dir: Path
) -> None:
    (mine,) = await lease(worker, books)
    (theirs,) = await lease(other_store, books)
    die(run_dir, [(mine, unsent)])

    await settlement.run_once()

    assert books.status(mine.email_id) == "pending"
    assert books.row(theirs.email_id)["locked_by"] == "worker-2"


async def test_an_email_that_another_worker_has_leased_since_is_changed_only_by_an_acceptance(
    settlement: LedgerRecovery, worker: LeaseStore, other_store: LeaseStore, books: Books, run_dir: Path
) -> None:
    lost, proven = await lease(worker, books, 2)
    for each in (lost, proven):
        books.change(each.email_id, status="pending", locked_until="epoch", lease_token=each.token + 1)
    await other_store.lease(books.keys([lost.email_id, proven.email_id]), 600)
    die(run_dir, [(lost, on_the_wire), (proven, answered(Accepted("late")))])
    before = books.row(lost.email_id)

    await settlement.run_once()

    assert books.row(lost.email_id) == before
    assert books.outcomes(lost.email_id) == ["uncertain"]
    assert (books.status(proven.email_id), books.row(proven.email_id)["provider_message_id"]) == ("sent", "late")


async def test_the_ledger_of_a_live_worker_is_not_settled(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    (each,) = await lease(worker, books)
    living = Ledger(run_dir, worker=WORKER, slot="slot-1", slots=1)
    living.set_database(DATABASE_ID)
    on_the_wire(living, each)

    await settlement.run_once()

    assert books.status(each.email_id) == "sending"
    assert left_over(run_dir) == [living.path.name]


async def test_of_a_ledger_of_the_previous_format_only_the_emails_on_the_wire_are_held(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    leases = await lease(worker, books, 20)
    steps = [on_the_wire, on_the_wire, answered(Accepted("id")), rendering, *[unsent] * 16]
    die(run_dir, list(zip(leases, steps, strict=True)), database_id=None)

    await settlement.run_once()

    assert books.statuses() == {"held": 2, "sent": 1, "pending": 17}
    assert {books.status(each.email_id) for each in leases[:2]} == {"held"}
    assert left_over(run_dir) == []


async def test_other_files_are_kept_and_do_not_stop_the_settlement_of_ledgers(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (each,) = await lease(worker, books)
    die(run_dir, [(each, answered(Accepted()))])
    (run_dir / "a.ledger").write_bytes(b"EDLEDGER" + bytes(5000))
    (run_dir / "b.ledger").mkdir()
    (run_dir / "c.ledger").symlink_to("c.ledger")
    os.mkfifo(run_dir / "d.ledger")
    (run_dir / "run.lock").touch()

    for _ in range(2):
        await settlement.run_once()

    assert books.status(each.email_id) == "sent"
    assert left_over(run_dir) == ["a.ledger", "b.ledger", "c.ledger", "d.ledger", "run.lock"]
    # Each unreadable file is reported once.
    assert capsys.readouterr().out.count("ledger.unreadable") == 4


async def test_a_refused_result_of_one_ledger_does_not_stop_the_settlement_of_the_others(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    refused, fine = await lease(worker, books, 2)
    die(run_dir, [(refused, answered(Rejected(Reason.REFUSED, "a NUL \0 inside")))])
    path = only_file(run_dir)
    path.rename(run_dir / "a.ledger")
    die(run_dir, [(fine, answered(Accepted()))])

    await settlement.run_once()

    assert books.status(fine.email_id) == "sent"
    # The relay records the outcome without the provider's text, which PostgreSQL refuses.
    assert (books.status(refused.email_id), books.row(refused.email_id)["last_error"]) == ("failed", None)
    assert left_over(run_dir) == []


async def test_a_lease_that_postgresql_refuses_to_release_does_not_affect_the_workers_others(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    leases = await lease(worker, books, 4)
    die(run_dir, [(each, unsent) for each in leases])

    with refused(books.connection, leases[0].email_id, "new.status = 'pending'"):
        await settlement.run_once()

    assert books.statuses() == {"sending": 1, "pending": 3}
    assert books.status(leases[0].email_id) == "sending"


async def test_an_email_that_was_being_rendered_is_a_suspect_and_is_released(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    suspect, innocent = await lease(worker, books, 2)
    die(run_dir, [(suspect, rendering), (innocent, unsent)])

    await settlement.run_once()

    for each in (suspect, innocent):
        row = books.row(each.email_id)
        assert (row["status"], row["attempt_count"], row["publish_due_at"] is None) == ("pending", 0, False)
    assert [books.row(each.email_id)["crash_count"] for each in (suspect, innocent)] == [1, 0]


async def test_a_suspect_whose_crash_cannot_be_counted_is_released_like_the_others(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    suspect, innocent = await lease(worker, books, 2)
    die(run_dir, [(suspect, rendering), (innocent, unsent)])

    with refused(books.connection, suspect.email_id, "new.crash_count > 0"), counted() as counts:
        await settlement.run_once()

    assert counts == Counter({("rescued", "worker_died"): 2, ("held", "worker_died"): 0})
    assert books.statuses() == {"pending": 2}
    assert left_over(run_dir) == []


async def test_an_email_fails_after_three_workers_died_rendering_it_and_the_other_emails_do_not(
    settlement: LedgerRecovery, other_store: LeaseStore, books: Books, run_dir: Path
) -> None:
    poison, *innocents = books.enqueue(4)
    for _ in range(3):
        leases = await other_store.lease(books.keys([poison, *innocents]), 600)
        for each in leases:
            books.change(each.email_id, locked_by=WORKER)
        die(run_dir, [(each, rendering if each.email_id == poison else unsent) for each in leases])
        await settlement.run_once()

    row = books.row(poison)
    assert (row["status"], row["error_type"], row["crash_count"]) == ("failed", "worker_crashed", 3)
    assert row["dead_letter_due_at"] is not None
    assert [books.row(each)["crash_count"] for each in innocents] == [0, 0, 0]
    assert books.statuses() == {"failed": 1, "pending": 3}


async def test_an_email_leased_by_another_worker_since_is_not_a_suspect(
    settlement: LedgerRecovery, worker: LeaseStore, other_store: LeaseStore, books: Books, run_dir: Path
) -> None:
    (each,) = await lease(worker, books)
    await worker.release({each.email_id: each.token})
    await other_store.lease(books.keys([each.email_id]), 600)
    die(run_dir, [(each, rendering)])

    await settlement.run_once()

    row = books.row(each.email_id)
    assert (row["status"], row["locked_by"], row["crash_count"]) == ("sending", "worker-2", 0)


@pytest.mark.parametrize("boot", ["", "00000000-0000-0000-0000-000000000000"])
async def test_after_a_reboot_only_emails_that_the_ledger_names_are_settled(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, boot: str
) -> None:
    unnamed, wire, done = await lease(worker, books, 3)
    die(run_dir, [(unnamed, unsent), (wire, on_the_wire), (done, answered(Accepted()))], boot=boot)

    await settlement.run_once()

    assert [books.status(each.email_id) for each in (unnamed, wire, done)] == ["sending", "held", "sent"]
    assert left_over(run_dir) == []


@contextlib.contextmanager
def locked(tables_url: str, lease: Lease) -> Iterator[psycopg.Connection]:
    with psycopg.connect(tables_url) as person:
        Books(person).lock(lease.email_id)
        yield person


def numbers(books: Books) -> set[int]:
    """The pids of the worker's sessions. In this test the pool outlives the worker, and replaces terminated
    sessions."""
    return {row["pid"] for row in books.sessions(WORKER)}


async def test_a_running_statement_of_the_dead_worker_is_ended_first(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    email_id = books.enqueue_one()
    with psycopg.connect(tables_url) as person:
        Books(person).lock(email_id)
        leasing = asyncio.create_task(worker.lease(books.keys([email_id]), 600))
        await until(lambda: books.waiting_for_a_lock(WORKER))
        before = numbers(books)
        die(run_dir, [])

        await settlement.run_once()

        assert not before & numbers(books)
        person.commit()
    with pytest.raises(Exception, match="terminating connection"):
        await leasing
    row = books.row(email_id)
    assert (row["status"], row["lease_token"], row["publish_due_at"] is None) == ("pending", 0, False)


async def test_a_running_record_of_the_dead_worker_is_not_recorded_twice(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    (each,) = await lease(worker, books)
    with locked(tables_url, each) as person:
        recording = asyncio.create_task(worker.record([result(each, Status.SENT, started_at=BEGAN)]))
        await until(lambda: books.waiting_for_a_lock(WORKER))
        before = numbers(books)
        die(run_dir, [(each, answered(Accepted()))])
        settling = asyncio.create_task(settlement.run_once())
        await until(lambda: not before & numbers(books))
        person.commit()
        await settling
    with pytest.raises(Exception, match="terminating connection"):
        await recording

    assert books.status(each.email_id) == "sent"
    assert books.outcomes(each.email_id) == ["accepted"]
    assert books.hourly() == {"accepted": 1}


async def test_an_interrupted_settlement_runs_again(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    unnamed, done = await lease(worker, books, 2)
    die(run_dir, [(unnamed, unsent), (done, answered(Accepted()))])
    with locked(tables_url, done):
        settling = asyncio.create_task(settlement.run_once())
        await until(lambda: books.waiting_for_a_lock("dispatcher relay settlement"))
        books.terminate("dispatcher relay settlement")
        with pytest.raises(StoreUnavailable):
            await settling
    assert len(left_over(run_dir)) == 1

    while left_over(run_dir):
        await settlement.run_once()

    assert [books.status(each.email_id) for each in (unnamed, done)] == ["pending", "sent"]
    assert books.outcomes(done.email_id) == ["accepted"]


async def test_a_ledger_deleted_during_its_settlement_is_settled(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    (done,) = await lease(worker, books)
    die(run_dir, [(done, answered(Accepted()))])
    with locked(tables_url, done) as person:
        settling = asyncio.create_task(settlement.run_once())
        await until(lambda: books.waiting_for_a_lock("dispatcher relay settlement"))
        only_file(run_dir).unlink()
        person.commit()
        await settling

    assert books.status(done.email_id) == "sent"


async def test_locked_emails_are_settled_later_and_delay_nothing(
    worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    unnamed, other, wire, done, poison = await lease(worker, books, 5)
    steps = [(wire, on_the_wire), (done, answered(Accepted())), (poison, rendering)]
    die(run_dir, [(unnamed, unsent), (other, unsent), *steps])
    pool = make_pool(tables_url, name="dispatcher relay settlement", size=1, lock_seconds=0.1)
    await pool.open()
    settlement = LedgerRecovery(settings(run_dir), pool)

    with locked(tables_url, unnamed) as person:
        for each in (wire, poison):
            Books(person).lock(each.email_id)
        for _ in range(2):
            await settlement.run_once()
            assert [books.status(each.email_id) for each in (other, done)] == ["pending", "sent"]
            assert {books.status(each.email_id) for each in (unnamed, wire, poison)} == {"sending"}
            assert len(left_over(run_dir)) == 1
    await settlement.run_once()

    assert [books.status(each.email_id) for each in (unnamed, wire, poison)] == ["pending", "held", "pending"]
    assert books.row(poison.email_id)["crash_count"] == 1
    assert [books.outcomes(each.email_id) for each in (done, wire)] == [["accepted"], ["uncertain"]]
    assert left_over(run_dir) == []
    await pool.close()


async def test_a_ledger_from_before_the_last_boot_is_kept_until_its_emails_can_be_recorded(
    worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    (each,) = await lease(worker, books)
    die(run_dir, [(each, answered(Accepted()))], boot="an earlier start")
    pool = make_pool(tables_url, name="dispatcher relay settlement", size=1, lock_seconds=0.1)
    await pool.open()
    settlement = LedgerRecovery(settings(run_dir), pool)

    with locked(tables_url, each):
        with counted() as counts:
            await settlement.run_once()
        assert counts == Counter()
        assert len(left_over(run_dir)) == 1
    await settlement.run_once()

    assert books.status(each.email_id) == "sent"
    assert left_over(run_dir) == []
    await pool.close()


async def test_a_session_that_does_not_end_delays_only_its_own_ledger_until_the_leases_expire(
    pool: Pool, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    settlement = LedgerRecovery(settings(run_dir, DISPATCHER_LEASE_SECONDS="1"), pool)
    unnamed, wire, done = await lease(worker, books, 3)
    other_pool = make_pool(tables_url, name="host:w1:18:cafe", size=1)
    await other_pool.open()
    other = LeaseStore(other_pool, worker="host:w1:18:cafe", slot="slot-2")
    others = await lease(other, books, 2)
    await other_pool.close()
    die(run_dir, [(unnamed, unsent), (wire, on_the_wire), (done, answered(Accepted()))])
    die(run_dir, [(others[0], unsent), (others[1], on_the_wire)], worker="host:w1:18:cafe")
    with frozen_sessions(books, WORKER):
        await settlement.run_once()

        assert [books.status(each.email_id) for each in others] == ["pending", "held"]
        assert [books.status(each.email_id) for each in (unnamed, wire, done)] == ["sending"] * 3
        books.connection.execute("update email_log set locked_until = '2026-01-01' where status = 'sending'")
        await until_answer(lambda: looked(settlement, lambda: books.statuses()["sending"] == 0))
        assert [books.status(each.email_id) for each in (unnamed, wire, done)] == ["pending", "held", "sent"]
        assert len(left_over(run_dir)) == 1

    await until_answer(lambda: looked(settlement, lambda: left_over(run_dir) == []))
    assert [books.status(each.email_id) for each in (unnamed, wire, done)] == ["pending", "held", "sent"]


async def looked(settlement: LedgerRecovery, is_done: Callable[[], bool]) -> bool:
    """Runs one round of the recovery; returns whether `is_done` is true afterwards."""
    await settlement.run_once()
    return is_done()


async def test_a_ledger_of_another_database_is_kept_reported_and_not_settled(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (theirs,) = await lease(worker, books)
    other = UUID("0d150a7c-0000-4000-8000-00000000000a")
    die(run_dir, [(theirs, on_the_wire)], database_id=other)
    living = Ledger(run_dir, worker="host:w1:18:cafe", slot="slot-2", slots=1)
    living.set_database(other)
    before = left_over(run_dir)

    for _ in range(2):
        await settlement.run_once()

    assert left_over(run_dir) == before
    assert books.status(theirs.email_id) == "sending"
    assert settlement.workers_here == frozenset()
    assert capsys.readouterr().out.count("ledger.foreign") == 2  # one event for each of the two ledgers


async def recover_all(tables_url: str, books: Books) -> None:
    """Makes all leases expire, and recovers their emails as a relay of a different host would."""
    books.connection.execute("update email_log set locked_until = '2026-01-01' where status = 'sending'")
    async with await connect_async(tables_url, name="leader") as session:
        outbox = Outbox(session)
        await outbox.recover_expired(OnUncertain.HOLD, 3, await outbox.find_expiring())


async def test_the_ledger_of_a_dead_worker_corrects_the_recovery_by_another_host(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    unnamed, wire, accepted, deferred, rejected = await lease(worker, books, 5)
    answers: list[tuple[Lease, Outcome]] = [
        (accepted, Accepted()),
        (deferred, Deferred(Reason.THROTTLED)),
        (rejected, Rejected(Reason.REFUSED)),
    ]
    steps: list[tuple[Lease, Step]] = [(each, answered(outcome)) for each, outcome in answers]
    die(run_dir, [(unnamed, unsent), (wire, on_the_wire), *steps])
    await recover_all(tables_url, books)
    assert books.statuses() == {"held": 5}

    await settlement.run_once()

    found = {each.email_id: books.row(each.email_id) for each in (unnamed, wire, accepted, deferred, rejected)}
    statuses = [row["status"] for row in found.values()]
    assert statuses == ["pending", "held", "sent", "pending", "failed"]
    # An unsent email uses no attempt; a definite refusal uses one.
    counts = [row["attempt_count"] - row["attempt_base"] for row in found.values()]
    assert counts == [0, 1, 1, 1, 1]
    assert [row["was_uncertain"] for row in found.values()] == [False, True, True, False, False]
    assert [row["dead_letter_due_at"] is None for row in found.values()] == [True, False, True, True, False]
    audited = books.select("select email_id, actor, action from operator_audit")
    assert {row["email_id"] for row in audited} == {each.email_id for each in (unnamed, deferred, rejected)}
    assert {(row["actor"], row["action"]) for row in audited} == {("recovery", "recover")}
    assert left_over(run_dir) == []


async def test_a_recovered_email_that_an_operator_discarded_stays_held_unless_it_was_accepted(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    unnamed, deferred, given_back, accepted = await lease(worker, books, 4)
    die(
        run_dir,
        [
            (unnamed, unsent),
            (deferred, answered(Deferred(Reason.THROTTLED))),
            (given_back, unsent),
            (accepted, answered(Accepted())),
        ],
    )
    await recover_all(tables_url, books)
    for each in (unnamed, deferred, given_back, accepted):
        books.change(each.email_id, dead_letter_due_at=None, dead_letter_discarded_at=BEGAN)

    await worker.release({given_back.email_id: given_back.token})
    await settlement.run_once()

    found = [books.status(each.email_id) for each in (unnamed, deferred, given_back, accepted)]
    assert found == ["held", "held", "held", "sent"]
    assert books.row(unnamed.email_id)["dead_letter_discarded_at"] == BEGAN
    assert left_over(run_dir) == []


async def test_a_ledger_from_before_a_reboot_undoes_recovery_only_by_its_answers(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    unnamed, rejected = await lease(worker, books, 2)
    die(run_dir, [(unnamed, unsent), (rejected, answered(Rejected(Reason.REFUSED)))], boot="another")
    await recover_all(tables_url, books)

    await settlement.run_once()

    assert [books.status(each.email_id) for each in (unnamed, rejected)] == ["held", "failed"]
    assert left_over(run_dir) == []


async def test_recovery_of_a_locked_row_is_undone_later(
    worker: LeaseStore, books: Books, run_dir: Path, tables_url: str
) -> None:
    (unnamed,) = await lease(worker, books)
    die(run_dir, [(unnamed, unsent)])
    await recover_all(tables_url, books)
    pool = make_pool(tables_url, name="dispatcher relay settlement", size=1, lock_seconds=0.1)
    await pool.open()
    settlement = LedgerRecovery(settings(run_dir), pool)

    async def is_settled() -> bool:  # autovacuum may lock a table for longer than 0.1 s
        await settlement.run_once()
        return left_over(run_dir) == []

    with locked(tables_url, unnamed):
        await settlement.run_once()
        assert len(left_over(run_dir)) == 1
    await until_answer(is_settled)

    assert books.status(unnamed.email_id) == "pending"
    await pool.close()


async def test_a_ledger_waits_while_postgresql_is_unreachable(run_dir: Path) -> None:
    die(run_dir, [])
    pool = make_pool("postgresql://nobody@127.0.0.1:1/nothing", name="x", size=1)
    pool.timeout = 0.1
    await pool.open()

    with pytest.raises(StoreUnavailable):
        await LedgerRecovery(settings(run_dir), pool).run_once()

    assert len(left_over(run_dir)) == 1
    await pool.close()


async def test_the_relay_settles_a_ledger_within_moments_of_a_death(
    settlement: LedgerRecovery, worker: LeaseStore, books: Books, run_dir: Path
) -> None:
    running = asyncio.create_task(Periodic(settlement).run())
    leases = await lease(worker, books, 2)

    die(run_dir, [(leases[0], unsent), (leases[1], answered(Accepted()))])

    await until(lambda: books.statuses() == {"pending": 1, "sent": 1})
    running.cancel()
