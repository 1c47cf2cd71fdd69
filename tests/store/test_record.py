"""A result is recorded once, and only under a valid lease. An acceptance is recorded even under a lost lease.

`test_machine` tests the rows after any sequence of statements. Here are the columns and the batches that it leaves out.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.scrub import OWN_SECRETS
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.store.results import storable
from tests.store.books import Books
from tests.store.results import RECORDABLE, lease_one, lease_some, result
from tests.waiting import until

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "fields", "columns"),
    [
        (Status.SENT, {}, {"sent_at": True}),
        (Status.FAILED, {"error_type": "refused"}, {"dead_letter_due_at": True}),
        (Status.HELD, {"error_type": "outcome_unknown"}, {"dead_letter_due_at": True}),
        (Status.PENDING, {"error_type": "outcome_unknown"}, {"publish_due_at": True}),
        (Status.SENDING, {"error_type": "throttled"}, {"locked_by": True, "attempt_count": 2}),
        (Status.WAITING, {"error_type": "refused"}, {"wait_until": True, "attempt_base": 1, "redelivery_count": 1}),
    ],
    ids=lambda each: each if isinstance(each, Status) else "",
)
async def test_a_result_leaves_its_status_its_answer_and_what_is_due(
    store: LeaseStore, books: Books, status: Status, fields: dict[str, Any], columns: dict[str, Any]
) -> None:
    lease = await lease_one(store, books)
    told = {"error": "550 5.7.1 no", "provider_code": "550 5.7.1", "provider_message_id": "queued as 7", **fields}
    waits = {Status.SENDING: {"lease_seconds": 300.0}, Status.WAITING: {"wait_seconds": 300.0}}

    ours = await store.record([result(lease, status, **told, **waits.get(status, {}))])

    row = books.row(lease.email_id)
    assert ours == {lease.email_id}
    assert (row["status"], row["provider"], row["provider_message_id"]) == (status, "smtp", "queued as 7")
    assert (row["error_type"], row["last_error"]) == (fields.get("error_type"), "550 5.7.1 no")
    marks = ("sent_at", "locked_by", "publish_due_at", "dead_letter_due_at", "wait_until")
    assert {name for name in marks if row[name] is not None} == {name for name in marks if name in columns}
    counts = {"attempt_count": 1, "attempt_base": 0, "redelivery_count": 0, "lease_token": 1} | columns
    assert [row[name] for name in counts if name not in marks] == [counts[n] for n in counts if n not in marks]
    (now,) = books.select("select clock_timestamp() as instant")
    for mark, is_used in (("locked_until", status is Status.SENDING), ("wait_until", status is Status.WAITING)):
        if is_used:
            assert timedelta(seconds=290) < row[mark] - now["instant"] <= timedelta(seconds=300)
    again = await store.lease(books.keys([lease.email_id]), 60)
    assert [each.attempt_number for each in again] == ([2] if status is Status.PENDING else [])


async def test_a_redelivery_under_a_lease_that_recovery_took_makes_the_dead_letter_stale(
    store: LeaseStore, books: Books, outbox: Outbox
) -> None:
    lease = await lease_one(store, books)
    books.change(lease.email_id, locked_until=EXPIRED)
    await outbox.recover_expired(OnUncertain.HOLD, 5, await outbox.find_expiring())
    assert books.row(lease.email_id)["status"] == "held"

    ours = await store.record([result(lease, Status.WAITING, wait_seconds=300.0, error_type="refused")])

    row = books.row(lease.email_id)
    assert ours == set(), "its lease is lost"
    assert (row["status"], row["attempt_base"], row["redelivery_count"]) == ("waiting", 1, 1)
    assert (row["dead_letter_due_at"], row["was_uncertain"]) == (None, False)
    assert books.select("select action from operator_audit") == [{"action": "recover"}]


ATTEMPT = {"worker": "worker-1", "provider": "smtp", "error_type": None, "provider_code": None}


async def test_every_attempt_is_stored_with_all_its_fields(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books)
    began = datetime(2026, 11, 2, 3, 4, 5, 678901, UTC)
    told = {"error_type": "throttled", "error": "slow down, “pléase”", "provider_code": "451 4.7.1"}
    times = {"started_at": began, "finished_at": began + timedelta(milliseconds=1)}
    await store.record([result(lease, Status.SENDING, **told, **times)])
    accepted = result(lease, Status.SENT, attempt_number=2, provider="capture", error="250 queued", finished_at=EXPIRED)
    await store.record([accepted])

    first = {"attempt_number": 1, "outcome": "deferred", **told, **times}
    second = {"attempt_number": 2, "outcome": "accepted", "provider": "capture", "error": "250 queued"}
    second |= {"started_at": accepted.started_at, "finished_at": EXPIRED}
    assert books.attempts(lease.email_id) == [
        {"email_id": lease.email_id, **ATTEMPT, **each} for each in (first, second)
    ]
    assert books.count("email_attempt") == 1, "an acceptance is stored in the email's row"


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


@pytest.mark.parametrize("statuses", [[Status.SENT], sorted(RECORDABLE)[:5]], ids=["accepted", "mixed"])
async def test_five_hundred_results_are_recorded_in_one_statement_and_do_not_mix(
    store: LeaseStore, books: Books, statuses: list[Status]
) -> None:
    leases = list(zip(await lease_some(store, books, 512), statuses * 512, strict=False))
    results = [
        result(
            lease,
            status,
            error=str(lease.email_id),
            provider_message_id=f"<{lease.email_id}>",
            recipient_outcomes={number: None} if status is Status.SENDING else None,
        )
        for number, (lease, status) in enumerate(leases)
    ]

    assert len(await store.record(results[::-1])) == 512

    found = {row["email_id"]: (row["status"], row["last_error"], row["provider_message_id"]) for row in books.rows()}
    assert found == {lease.email_id: (status, str(lease.email_id), f"<{lease.email_id}>") for lease, status in leases}
    partly = {row["email_id"]: row["recipient_outcomes"] for row in books.rows() if row["recipient_outcomes"]}
    sending = {each.email_id: number for number, (each, status) in enumerate(leases) if status is Status.SENDING}
    assert partly == {email_id: {f"{number}": None} for email_id, number in sending.items()}
    assert sum(books.hourly().values()) == 512


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


@pytest.mark.parametrize(
    "outcome",
    [
        Deferred(Reason.SERVER_ERROR, "the token tok-12345678 is not valid"),
        Rejected(Reason.REFUSED, "dG9rLTEyMzQ1Njc4 is not valid", "403"),
        Uncertain("no answer for tok-12345678"),
    ],
    ids=str,
)
def test_an_adapter_that_forgets_to_scrub_shows_no_secret(outcome: Outcome) -> None:
    OWN_SECRETS.register("journal", ["tok-12345678"])
    try:
        detail = storable(outcome).detail or ""
    finally:
        OWN_SECRETS.register("journal", ())

    assert "<credential>" in detail
    assert "tok-12345678" not in detail
    assert "dG9rLTEyMzQ1Njc4" not in detail
