"""A result is recorded once, and only under a valid lease. An acceptance is recorded even under a lost lease."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from dispatcher.domain.status import FINISHED, TRANSITIONS, OnUncertain, Status
from dispatcher.errors import StoreUnavailable
from dispatcher.store.connections import Pool, connect_async
from dispatcher.store.figures import count_emails
from dispatcher.store.leases import Lease, LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.store.settlement import find_leases, release_found
from tests.store.books import Books
from tests.store.results import RECORDABLE, result
from tests.waiting import until

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)


async def lease_some(store: LeaseStore, books: Books, count: int) -> list[Lease]:
    leases = await store.lease(books.keys(books.enqueue(count)), 60)
    return sorted(leases, key=lambda lease: lease.email_id)


async def lease_one(store: LeaseStore, books: Books) -> Lease:
    return (await lease_some(store, books, 1))[0]


async def test_a_sent_result_closes_the_lease(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books)

    ours = await store.record([result(lease, Status.SENT, provider_message_id="queued as 7")])

    assert ours == {lease.email_id}
    row = books.row(lease.email_id)
    assert (row["status"], row["locked_by"], row["provider"]) == ("sent", None, "smtp")
    assert row["provider_message_id"] == "queued as 7"
    assert row["sent_at"] is not None
    assert (row["publish_due_at"], row["dead_letter_due_at"], row["error_type"]) == (None, None, None)
    assert row["attempt_count"] == 1


@pytest.mark.parametrize(("status", "reason"), [(Status.FAILED, "refused"), (Status.HELD, "outcome_unknown")])
async def test_failed_and_held_results_close_the_lease_and_make_the_dead_letter_due(
    store: LeaseStore, books: Books, status: Status, reason: str
) -> None:
    lease = await lease_one(store, books)

    await store.record([result(lease, status, error_type=reason, error="550 5.7.1 no", provider_code="550 5.7.1")])

    row = books.row(lease.email_id)
    assert (row["status"], row["locked_by"], row["publish_due_at"]) == (status, None, None)
    assert (row["error_type"], row["last_error"]) == (reason, "550 5.7.1 no")
    assert row["dead_letter_due_at"] is not None
    assert row["sent_at"] is None


async def test_a_deferral_extends_the_lease_for_the_next_attempt(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books)

    ours = await store.record([result(lease, Status.SENDING, lease_seconds=300.0, error_type="throttled")])

    assert ours == {lease.email_id}
    row = books.row(lease.email_id)
    (now,) = books.select("select clock_timestamp() as instant")
    assert (row["status"], row["locked_by"], row["lease_token"], row["attempt_count"]) == ("sending", "worker-1", 1, 2)
    assert timedelta(seconds=290) < row["locked_until"] - now["instant"] <= timedelta(seconds=300)
    assert (row["publish_due_at"], row["dead_letter_due_at"]) == (None, None)


async def test_a_redelivery_ends_the_lease_and_waits_without_a_dead_letter(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books)

    ours = await store.record([result(lease, Status.WAITING, wait_seconds=300.0, error_type="refused")])

    assert ours == {lease.email_id}
    row = books.row(lease.email_id)
    (now,) = books.select("select clock_timestamp() as instant")
    assert (row["status"], row["wait_reason"], row["locked_by"]) == ("waiting", "redelivery", None)
    assert timedelta(seconds=290) < row["wait_until"] - now["instant"] <= timedelta(seconds=300)
    assert (row["attempt_count"], row["attempt_base"], row["redelivery_count"]) == (1, 1, 1)
    assert (row["publish_due_at"], row["dead_letter_due_at"], row["error_type"]) == (None, None, "refused")
    assert await store.lease(books.keys([lease.email_id]), 60) == [], "the email is not due yet"


async def test_a_redelivery_under_a_lease_that_recovery_took_makes_the_dead_letter_stale(
    store: LeaseStore, books: Books, tables_url: str
) -> None:
    lease = await lease_one(store, books)
    books.change(lease.email_id, locked_until=EXPIRED)
    async with await connect_async(tables_url, name="relay") as session:
        outbox = Outbox(session)
        await outbox.recover_expired(OnUncertain.HOLD, 5, await outbox.find_expiring())
    assert books.row(lease.email_id)["status"] == "held"

    ours = await store.record([result(lease, Status.WAITING, wait_seconds=300.0, error_type="refused")])

    row = books.row(lease.email_id)
    assert ours == set(), "its lease is lost"
    assert (row["status"], row["attempt_base"], row["redelivery_count"]) == ("waiting", 1, 1)
    assert (row["dead_letter_due_at"], row["was_uncertain"]) == (None, False)
    assert books.select("select action from operator_audit") == [{"action": "recover"}]


async def test_a_redelivery_under_a_lost_lease_changes_nothing(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books)
    await store.release({lease.email_id: lease.token})
    (newer,) = await store.lease(books.keys([lease.email_id]), 60)

    ours = await store.record([result(lease, Status.WAITING)])

    row = books.row(lease.email_id)
    assert (ours, row["status"], row["lease_token"], row["wait_until"]) == (set(), "sending", newer.token, None)


async def test_a_repeated_acceptance_changes_nothing_and_reports_that_the_lease_is_lost(
    store: LeaseStore, books: Books
) -> None:
    first, second = await lease_some(store, books, 2)
    await store.record([result(first, Status.SENT, provider_message_id="1")])
    before = books.row(first.email_id)

    ours = await store.record([result(each, Status.SENT, provider_message_id="2") for each in (first, second)])

    assert ours == {second.email_id}
    assert books.row(first.email_id) == before
    assert books.row(second.email_id)["provider_message_id"] == "2"
    assert books.hourly() == {"accepted": 2}


async def test_an_email_to_be_resent_is_pending_and_due(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books)

    await store.record([result(lease, Status.PENDING)])

    row = books.row(lease.email_id)
    assert (row["status"], row["locked_by"], row["attempt_count"]) == ("pending", None, 1)
    assert row["publish_due_at"] is not None
    assert (await store.lease(books.keys([lease.email_id]), 60))[0].attempt_number == 2


async def test_every_attempt_is_stored_with_all_its_fields(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books)
    began = datetime(2026, 11, 2, 3, 4, 5, 678901, UTC)
    first = result(
        lease,
        Status.SENDING,
        started_at=began,
        finished_at=began + timedelta(milliseconds=1),
        error_type="throttled",
        error="slow down, “pléase”",
        provider_code="451 4.7.1",
    )
    await store.record([first])
    await store.record([result(lease, Status.SENT, attempt_number=2, provider="capture")])

    one, two = books.attempts(lease.email_id)
    assert one == {
        "email_id": lease.email_id,
        "attempt_number": 1,
        "worker": "worker-1",
        "provider": "smtp",
        "started_at": began,
        "finished_at": began + timedelta(milliseconds=1),
        "outcome": "deferred",
        "error_type": "throttled",
        "error": "slow down, “pléase”",
        "provider_code": "451 4.7.1",
    }
    assert (two["attempt_number"], two["outcome"], two["provider"]) == (2, "accepted", "capture")


@pytest.mark.parametrize("earlier", [0, 1])
async def test_an_accepted_attempt_is_stored_in_the_emails_row(store: LeaseStore, books: Books, earlier: int) -> None:
    lease = await lease_one(store, books)
    if earlier:
        await store.record([result(lease, Status.SENDING)])
    accepted = result(lease, Status.SENT, attempt_number=1 + earlier, error="250 queued", finished_at=EXPIRED)
    await store.record([accepted])

    assert books.count("email_attempt") == earlier
    assert books.attempts(lease.email_id)[earlier] == {
        "email_id": lease.email_id,
        "attempt_number": 1 + earlier,
        "worker": "worker-1",
        "provider": "smtp",
        "started_at": accepted.started_at,
        "finished_at": EXPIRED,
        "outcome": "accepted",
        "error_type": None,
        "error": "250 queued",
        "provider_code": None,
    }


async def test_an_acceptance_after_another_attempt_began_keeps_its_own_number(
    store: LeaseStore, other_store: LeaseStore, books: Books
) -> None:
    late, fine = await lease_some(store, books, 2)
    books.change(late.email_id, status="pending", locked_until=EXPIRED)
    (newer,) = await other_store.lease(books.keys([late.email_id]), 60)

    await store.record([result(late, Status.SENT), result(fine, Status.SENT)])
    await other_store.record([result(newer, Status.SENT)])

    found = [(row["attempt_number"], row["worker"]) for row in books.attempts(late.email_id)]
    assert found == [(1, "worker-1"), (2, "worker-2")]
    assert len(books.attempts(fine.email_id)) == 1
    assert books.hourly() == {"accepted": 2}


@pytest.mark.parametrize("status", sorted(RECORDABLE - {Status.SENT}))
async def test_a_result_without_its_lease_changes_no_email_but_stores_the_attempt(
    store: LeaseStore, books: Books, status: Status
) -> None:
    lease = await lease_one(store, books)
    books.change(lease.email_id, lease_token=lease.token + 1, locked_by="worker-2")
    before = books.row(lease.email_id)

    ours = await store.record([result(lease, status)])

    assert ours == set()
    assert books.row(lease.email_id) == before
    assert len(books.attempts(lease.email_id)) == 1
    assert books.hourly() == {}


@pytest.mark.parametrize("finished", sorted(FINISHED & RECORDABLE))
@pytest.mark.parametrize("status", sorted(RECORDABLE - {Status.SENT}))
async def test_a_result_does_not_reopen_a_finished_email_even_under_its_token(
    store: LeaseStore, books: Books, finished: Status, status: Status
) -> None:
    lease = await lease_one(store, books)
    await store.record([result(lease, finished)])
    before = books.row(lease.email_id)

    assert await store.record([result(lease, status)]) == set()

    assert books.row(lease.email_id) == before


@pytest.mark.parametrize("error", [None, "250 2.0.0 queued"])
@pytest.mark.parametrize("standing", ["sending", "held", "failed"])
async def test_an_acceptance_leaves_the_same_rows_alone_and_in_a_batch_with_other_results(
    store: LeaseStore, books: Books, standing: str, error: str | None
) -> None:
    alone, together, other = await lease_some(store, books, 3)
    for lease in (alone, together):
        books.change(lease.email_id, error_type="throttled", last_error="later", pinned_at=EXPIRED, was_uncertain=True)
        if standing != "sending":
            books.change(lease.email_id, status=standing, rescued_token=1, lease_token=2, dead_letter_due_at=EXPIRED)
    books.connection.execute("update outgoing_feed set is_on = true")

    told: dict[str, str | None] = {"provider_message_id": "7", "error": error}
    assert await store.record([result(alone, Status.SENT, **told)]) == {alone.email_id}
    await store.record([result(together, Status.SENT, **told), result(other, Status.FAILED, error_type="refused")])

    (one,), (two,) = (books.attempts(lease.email_id) for lease in (alone, together))
    apart = {"email_id", "started_at", "finished_at"}
    assert {name: one[name] for name in one.keys() - apart} == {name: two[name] for name in two.keys() - apart}
    own = {"email_id", "message_key", "created_at", "published_at", "leased_at", "sent_at"}
    own |= {"attempt_worker", "attempt_started_at", "attempt_finished_at"}
    first, second = (books.row(lease.email_id) for lease in (alone, together))
    assert {name: first[name] for name in first.keys() - own} == {name: second[name] for name in second.keys() - own}
    events = books.select("select * from outgoing_event where kind = 'sent'")
    assert [event["provider"] for event in events] == ["smtp", "smtp"]
    assert len({(event["tenant_id"], event["reason"], event["code"]) for event in events}) == 1
    assert books.hourly() == {"accepted": 2, "rejected": 1}


@pytest.mark.parametrize("standing", ["pending", "failed", "held", "leased by another"])
async def test_a_late_acceptance_proves_that_the_email_was_sent(
    store: LeaseStore, other_store: LeaseStore, books: Books, standing: str
) -> None:
    lease = await lease_one(store, books)
    books.change(lease.email_id, status="pending", locked_by=None, locked_until=EXPIRED, publish_due_at=EXPIRED)
    if standing != "pending":
        (theirs,) = await other_store.lease(books.keys([lease.email_id]), 60)
        if standing != "leased by another":
            await other_store.record([result(theirs, Status(standing))])

    ours = await store.record([result(lease, Status.SENT, provider_message_id="late")])

    assert ours == {lease.email_id}
    row = books.row(lease.email_id)
    assert (row["status"], row["locked_by"], row["provider_message_id"]) == ("sent", None, "late")
    assert (row["publish_due_at"], row["dead_letter_due_at"]) == (None, None)
    assert await store.lease(books.keys([lease.email_id]), 60) == []
    assert await other_store.renew({lease.email_id: row["lease_token"]}, 60) == set()


async def test_a_second_acceptance_is_stored_but_not_counted(
    store: LeaseStore, other_store: LeaseStore, books: Books
) -> None:
    lease = await lease_one(store, books)
    await store.record([result(lease, Status.SENT, provider_message_id="first")])
    before = books.row(lease.email_id)

    assert await other_store.record([result(lease, Status.SENT, provider_message_id="second")]) == set()

    assert books.row(lease.email_id) == before
    assert len(books.attempts(lease.email_id)) == 2
    assert books.hourly() == {"accepted": 1}


async def test_the_hourly_counts_equal_the_recorded_results(
    store: LeaseStore, other_store: LeaseStore, books: Books
) -> None:
    wanted = [Status.SENT] * 5 + [Status.FAILED] * 4 + [Status.HELD] * 3 + [Status.SENDING] * 2
    for number, each in enumerate((store, other_store)):
        leases = await lease_some(each, books, len(wanted))
        results = [result(lease, status) for lease, status in zip(leases, wanted, strict=True)]
        await asyncio.gather(each.record(results[:7]), each.record(results[7:]))
        lost = await lease_one(each, books)
        books.change(lost.email_id, lease_token=99, status="held" if number else "failed")
        await each.record([result(lost, Status.FAILED)])

    statuses = books.statuses()
    assert books.hourly() == {"accepted": 10, "rejected": 8, "uncertain": 6, "deferred": 4}
    assert (statuses["sent"], statuses["failed"], statuses["held"], statuses["sending"]) == (10, 9, 7, 4)
    assert count_emails.sync(books.connection) == {
        **dict.fromkeys(Status, 0),
        **{Status(name): n for name, n in statuses.items()},
    }
    assert {row["slot"] for row in books.select("select distinct slot from email_hourly")} == {"slot-1", "slot-2"}


async def test_two_workers_record_at_once_without_waiting_for_each_other(
    store: LeaseStore, other_store: LeaseStore, books: Books, tables_url: str
) -> None:
    mine, theirs = await lease_one(store, books), await lease_one(other_store, books)
    await store.record([result(await lease_one(store, books), Status.SENT)])

    with psycopg.connect(tables_url) as person:
        person.execute("select from email_hourly for update")
        recording = asyncio.create_task(store.record([result(mine, Status.SENT)]))
        await until(lambda: books.waiting_for_a_lock("worker-1"))
        assert await other_store.record([result(theirs, Status.SENT)]) == {theirs.email_id}
        assert not recording.done()

    assert await recording == {mine.email_id}


async def test_five_hundred_results_are_recorded_in_one_statement(store: LeaseStore, books: Books) -> None:
    leases = await lease_some(store, books, 512)

    ours = await store.record([result(lease, Status.SENT) for lease in reversed(leases)])

    assert len(ours) == 512
    assert books.statuses() == {"sent": 512}
    assert books.hourly() == {"accepted": 512}


async def test_results_of_a_batch_do_not_mix(store: LeaseStore, books: Books) -> None:
    leases = await lease_some(store, books, 60)
    statuses = [sorted(RECORDABLE)[number % 5] for number in range(60)]

    await store.record(
        [
            result(lease, status, error=str(lease.email_id), provider_message_id=f"<{lease.email_id}>")
            for lease, status in zip(leases, statuses, strict=True)
        ]
    )

    for lease, status in zip(leases, statuses, strict=True):
        row = books.row(lease.email_id)
        assert (row["status"], row["last_error"]) == (status, str(lease.email_id))
        assert row["provider_message_id"] == f"<{lease.email_id}>"


async def test_an_email_that_fails_after_an_uncertain_attempt_is_marked_uncertain(
    store: LeaseStore, books: Books
) -> None:
    doubtful, plain = await lease_some(store, books, 2)
    await store.record([result(doubtful, Status.PENDING), result(plain, Status.PENDING, outcome="deferred")])
    again = await store.lease(books.keys([doubtful.email_id, plain.email_id]), 60)

    await store.record([result(each, Status.FAILED) for each in again])

    assert books.statuses() == {"failed": 2}
    assert [books.row(each.email_id)["was_uncertain"] for each in (doubtful, plain)] == [True, False]
    assert books.outcomes(doubtful.email_id) == ["uncertain", "rejected"]


async def test_a_batch_whose_answer_was_lost_is_recognised(
    store: LeaseStore, other_store: LeaseStore, books: Books
) -> None:
    recorded, unrecorded, lost = await lease_some(store, books, 3)
    books.change(lost.email_id, lease_token=99)
    sent, failed = result(recorded, Status.SENT), result(lost, Status.FAILED)
    await store.record([sent])
    await store.record([failed])

    assert await store.is_recorded(sent)
    assert await store.is_recorded(failed)
    assert not await store.is_recorded(result(unrecorded, Status.SENT))
    assert not await store.is_recorded(sent._replace(attempt_number=2))
    # The attempt number is 1 again after a replay.
    assert not await store.is_recorded(result(recorded, Status.SENT))
    assert not await other_store.is_recorded(sent)


async def test_an_interrupted_record_statement_wrote_all_or_nothing(
    pool: Pool, store: LeaseStore, books: Books, tables_url: str
) -> None:
    leases = await lease_some(store, books, 3)
    results = [result(lease, Status.SENT) for lease in leases]
    with psycopg.connect(tables_url) as person:
        Books(person).lock(leases[2].email_id)
        recording = asyncio.create_task(store.record(results))
        await until(lambda: books.waiting_for_a_lock("worker-1"))
        books.terminate("worker-1", waiting=True)
        with pytest.raises(StoreUnavailable):
            await recording

    assert books.statuses() == {"sending": 3}
    assert books.count("every_attempt") == 0

    assert not await store.is_recorded(results[0])
    assert len(await store.record(results)) == 3
    assert books.hourly() == {"accepted": 3}


async def test_every_status_change_is_in_the_table_of_transitions(
    store: LeaseStore, books: Books, pool: Pool, tables_url: str
) -> None:
    allowed = {(before, after) for (before, _), after in TRANSITIONS.items()}
    seen: set[tuple[Status, Status]] = set()
    session = await connect_async(tables_url, name="transitions")

    async def watch(before: Status, moved: str, **columns: object) -> None:
        lease = await lease_one(store, books)
        books.change(lease.email_id, status=before, **columns)
        tokens = {lease.email_id: lease.token}
        match moved:
            case "lease":
                await store.lease(books.keys([lease.email_id]), 60)
            case "renew":
                await store.renew(tokens, 60)
            case "release":
                await store.release(tokens)
            case "release_unanswered":
                await store.release_unanswered([lease.email_id])
            case "release_found":
                await release_found(session, await find_leases(session, "worker-1"))
            case "rescue":
                outbox = Outbox(session)
                await outbox.recover_expired(OnUncertain.HOLD, 5, await outbox.find_expiring())
            case status:
                await store.record([result(lease, Status(status))])
        seen.add((before, Status(books.status(lease.email_id))))

    moves = ["lease", "renew", "release", "release_unanswered", "release_found", "rescue", *RECORDABLE]
    for before in Status:
        for moved in moves:
            await watch(before, moved)
            await watch(before, moved, locked_until=EXPIRED, on_uncertain="resend")
    await session.close()

    moved_to = {pair for pair in seen if pair[0] is not pair[1]}
    assert moved_to <= allowed
    assert {(Status.PENDING, Status.SENDING), (Status.SENDING, Status.HELD), (Status.HELD, Status.SENT)} <= moved_to
