"""Confirm, release, cancel and reschedule: the email's row decides if it is too late; each change is audited."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.actions.batch import Batch, Judged
from dispatcher.actions.held import Confirm, Release
from dispatcher.actions.runner import Face, Who, run_batch
from dispatcher.actions.unsent import Cancel, Reschedule
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.leases import LeaseStore
from tests.ops.dead_emails import Desk, decide
from tests.store.books import Books
from tests.waiting import until

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
TOMORROW = datetime.now(UTC) + timedelta(days=1)
CONFIRM = Confirm(reason="ann@example.org got it")
RELEASE = Release(reason="the provider never had it")
CANCEL = Cancel(reason="ann@example.org has paid")
RESCHEDULE = Reschedule(reason="later", send_at=TOMORROW)


async def judge(session: AsyncSession, asked: Batch, *ids: UUID) -> list[Judged]:
    return [each async for batch in run_batch(session, asked, Who(Face.COMMAND, "ann@ops-1"), ids) for each in batch]


def waiting(books: Books, **columns: Any) -> UUID:
    email_id = books.enqueue_one()
    usual = {"status": "waiting", "wait_until": TOMORROW, "wait_reason": "scheduled", "publish_due_at": None}
    books.change(email_id, **{**usual, **columns})
    return email_id


async def test_a_confirmed_email_is_sent_and_a_released_one_pending_with_all_attempts(desk: Desk) -> None:
    ids = [*desk.create(status="held"), *desk.create(status="held", provider="ses")]
    (released,) = desk.create(status="held", dead_letter_due_at=LONG_AGO)

    assert await decide(desk.session, CONFIRM, *ids) == ["confirmed", "confirmed"]
    assert await decide(desk.session, RELEASE, released) == ["released"]

    row = desk.books.row(ids[0])
    assert (row["status"], row["dead_letter_due_at"], row["sent_at"] is None) == ("sent", None, False)
    assert desk.books.hourly() == {"accepted": 2}
    row = desk.books.row(released)
    assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
    assert (row["dead_letter_due_at"], row["published_at"], row["publish_due_at"] is None) == (None, None, False)
    acts = {(act["actor"], act["action"], act["email_id"], act["reason"]) for act in desk.audit()}
    confirmed = {("ann@ops-1", "confirm", email_id, "<address> got it") for email_id in ids}
    assert acts == {*confirmed, ("ann@ops-1", "release", released, "the provider never had it")}


@pytest.mark.parametrize("status", ["pending", "waiting"])
async def test_a_cancelled_email_is_final_and_announced(desk: Desk, status: str) -> None:
    desk.books.connection.execute("update outgoing_feed set is_on = true")
    email_id = waiting(desk.books) if status == "waiting" else desk.books.enqueue_one()

    assert await judge(desk.session, CANCEL, email_id) == [Judged(email_id, "cancelled", Status(status))]
    assert await judge(desk.session, CANCEL, email_id) == [Judged(email_id, "already_cancelled", Status.CANCELLED)]

    row = desk.books.row(email_id)
    final = [row[name] for name in ("status", "error_type", "wait_until", "publish_due_at")]
    assert final == ["cancelled", "cancelled", None, None]
    (act,) = desk.audit()
    assert (act["actor"], act["action"], act["reason"]) == ("ann@ops-1", "cancel", "<address> has paid")
    assert act["detail"] == {"attempts": 0, "from": status}
    (event,) = desk.books.select("select * from outgoing_event")
    assert (event["kind"], event["reason"], event["email_id"]) == ("cancelled", "cancelled", email_id)


async def test_the_reason_of_a_cancelled_email_says_if_it_was_partly_sent(desk: Desk) -> None:
    desk.books.connection.execute("update outgoing_feed set is_on = true")
    email_id = desk.books.enqueue_one()
    desk.books.change(email_id, recipient_outcomes='{"1": null}', attempt_base=1)

    assert await decide(desk.session, CANCEL, email_id) == ["cancelled"]

    row = desk.books.row(email_id)
    assert (row["status"], row["error_type"]) == ("cancelled", "partly_delivered")
    assert row["last_error"] == "The email was cancelled after it was delivered to some of its recipients."
    (event,) = desk.books.select("select kind, reason from outgoing_event")
    assert event == {"kind": "cancelled", "reason": "partly_delivered"}


@pytest.mark.parametrize("status", ["pending", "waiting"])
async def test_a_rescheduled_email_waits_until_the_new_time(desk: Desk, status: str) -> None:
    before = {"wait_reason": "redelivery", "redelivery_count": 4, "attempt_count": 7, "attempt_base": 7}
    email_id = waiting(desk.books, **before) if status == "waiting" else desk.books.enqueue_one()
    later = TOMORROW + timedelta(hours=3)

    judged = await judge(desk.session, RESCHEDULE.but(send_at=later), email_id)

    row = desk.books.row(email_id)
    assert judged == [Judged(email_id, "rescheduled", Status(status))]
    assert (row["status"], row["wait_reason"], row["redelivery_count"]) == ("waiting", "scheduled", 0)
    assert (row["wait_until"], row["due_since"], row["publish_due_at"]) == (later, later, None)
    (act,) = desk.audit()
    assert (act["action"], act["detail"]["from"]) == ("reschedule", status)
    assert datetime.fromisoformat(act["detail"]["send_at"]) == later
    assert await decide(desk.session, RESCHEDULE.but(send_at=LONG_AGO), email_id) == ["rescheduled"]  # due at once
    age = datetime.now(UTC) - desk.books.row(email_id)["wait_until"]
    assert timedelta(0) <= age < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("columns", "verdicts"),
    [
        ({"status": "sent"}, {RELEASE: "already_sent", CONFIRM: "already_sent"}),
        ({"status": "pending"}, {RELEASE: "under_way", CONFIRM: "under_way"}),
        ({"status": "sending"}, {RELEASE: "under_way", CONFIRM: "under_way"}),
        ({"status": "cancelled"}, {RELEASE: "cancelled", CONFIRM: "cancelled"}),
        ({"status": "failed"}, {RELEASE: "failed", CONFIRM: "failed"}),
        ({"status": "held", "expires_at": LONG_AGO}, {RELEASE: "expired"}),
        *(({"status": each}, {CANCEL: "too_late", RESCHEDULE: "too_late"}) for each in ("sending", "sent", "failed")),
        ({"status": "held"}, {CANCEL: "too_late", RESCHEDULE: "too_late"}),
        ({"status": "pending", "proven_by": "ses"}, {CANCEL: "too_late", RESCHEDULE: "too_late"}),
        ({"status": "waiting", "wait_until": LONG_AGO, "expires_at": TOMORROW}, {RESCHEDULE: "expires_first"}),
    ],
)
async def test_an_email_that_cannot_be_changed_is_not_changed(
    desk: Desk, columns: dict[str, Any], verdicts: dict[Batch, str]
) -> None:
    (email_id,) = desk.create(**columns)
    before = desk.books.row(email_id)

    for asked, verdict in verdicts.items():
        assert await judge(desk.session, asked, email_id) == [Judged(email_id, verdict, Status(columns["status"]))]

    assert (desk.books.row(email_id), desk.audit()) == (before, [])


async def test_an_email_that_a_promotion_made_uncertain_is_not_rescheduled(desk: Desk) -> None:
    email_id = desk.books.enqueue_one()
    desk.books.change(email_id, publish_due_at=None, published_at=LONG_AGO)
    desk.books.connection.execute(
        "insert into relay_timeline (timeline, is_synchronous, uncertain_before) values (2, false, now())"
        " on conflict (is_only) do update set uncertain_before = now()"
    )

    assert await decide(desk.session, RESCHEDULE, email_id) == ["too_late"]
    assert desk.books.status(email_id) == "pending"


async def test_unknown_emails_other_tenants_and_deleted_content(desk: Desk) -> None:
    pruned, other = desk.create(2, status="held")
    desk.books.connection.execute("delete from email_content where email_id = %s", [pruned])
    pending, unknown = desk.books.enqueue_one(), uuid4()

    assert await decide(desk.session, RELEASE.but(tenant_id="another"), other) == ["unknown"]
    assert await decide(desk.session, RELEASE, unknown, pruned, other) == ["unknown", "content_pruned", "released"]
    assert await decide(desk.session, CONFIRM, unknown) == ["unknown"]
    found = await judge(desk.session, CANCEL.but(tenant_id="another"), pending, unknown)
    assert found == [Judged(pending, "unknown", None), Judged(unknown, "unknown", None)]
    assert desk.books.status(pending) == "pending"


@pytest.mark.parametrize(
    ("before", "meanwhile", "asked", "verdict", "after"),
    [
        ("sending", "held", RELEASE, "released", "pending"),
        ("held", "sent", RELEASE, "already_sent", "sent"),
        ("held", "pending", CONFIRM, "under_way", "pending"),
        ("pending", "sending", CANCEL, "too_late", "sending"),
        ("sending", "pending", CANCEL, "cancelled", "cancelled"),
    ],
)
async def test_a_decision_that_waits_for_the_row_judges_what_another_transaction_made_of_it(
    desk: Desk, before: str, meanwhile: str, asked: Batch, verdict: str, after: str
) -> None:
    email_id = desk.books.enqueue_one()
    desk.books.change(email_id, status=before, publish_due_at=None)

    async with await connect_async(desk.url, name="worker") as worker, worker.transaction():
        change = "update email_log set status = %(to)s, lease_token = 1, published_at = null,"
        change += " publish_due_at = case when %(to)s = 'pending' then now() end"
        await worker.execute(change.encode(), {"to": meanwhile})
        deciding = asyncio.create_task(judge(desk.session, asked, email_id))
        await until(lambda: desk.books.waiting_for_a_lock("operator"))

    assert await deciding == [Judged(email_id, verdict, Status(meanwhile))]
    assert desk.books.status(email_id) == after


async def test_a_locked_email_does_not_prevent_the_change_of_others(tables_url: str, books: Books) -> None:
    email_ids = books.enqueue(5)

    async with (
        await connect_async(tables_url, name="operator", lock_seconds=0.1) as operator,
        await connect_async(tables_url, name="left open") as other,
        other.transaction(),
    ):
        await other.execute("select from email_log where email_id = %s for update", [email_ids[2]])
        verdicts = await decide(operator, CANCEL, *email_ids)

    assert verdicts == [*["cancelled"] * 2, "locked", *["cancelled"] * 2]
    assert books.statuses() == {"cancelled": 4, "pending": 1}


async def test_exactly_one_of_cancel_and_lease_wins(tables_url: str, books: Books, store: LeaseStore) -> None:
    email_ids = books.enqueue(200)
    keys = books.keys(email_ids)

    async with await connect_async(tables_url, name="operator") as operator:

        async def cancel_each() -> list[Judged]:
            return [each for i in range(0, 200, 10) for each in await judge(operator, CANCEL, *email_ids[i : i + 10])]

        async def lease_each() -> list[Any]:
            backwards = list(reversed(email_ids))
            batches = [backwards[i : i + 10] for i in range(0, 200, 10)]
            return [lease for ids in batches for lease in await store.lease({i: keys[i] for i in ids}, 60)]

        changed, leases = await asyncio.gather(cancel_each(), lease_each())

    cancelled = {each.email_id for each in changed if each.verdict == "cancelled"}
    leased = {lease.email_id for lease in leases}
    assert cancelled | leased == set(email_ids)
    assert not cancelled & leased
    assert {each.email_id for each in changed if each.verdict == "too_late"} == leased


def test_a_reason_is_required() -> None:
    with pytest.raises(DispatcherError, match="reason"):
        Act.of(None, "  ")


@pytest.mark.parametrize("statement", ["update operator_audit set reason = ''", "delete from operator_audit"])
async def test_audit_records_cannot_be_changed(desk: Desk, statement: str) -> None:
    (email_id,) = desk.create(status="held")
    await decide(desk.session, CONFIRM, email_id)

    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        desk.books.connection.execute(statement.encode())
