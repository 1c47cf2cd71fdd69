"""Cancelling and rescheduling: the email's row decides whether it is too late; each change is audited."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatcher.actions.batch import Judged
from dispatcher.actions.runner import Face, Who, run_batch
from dispatcher.actions.unsent import Cancel, Reschedule
from dispatcher.domain.status import Status
from dispatcher.ops.acts import Act
from dispatcher.store.connections import AsyncSession, connect_async, make_pool
from dispatcher.store.leases import LeaseStore
from tests.store.books import Books
from tests.waiting import until

ACT = Act.of("ann@ops-1", "ann@example.org has paid")
TOMORROW = datetime.now(UTC) + timedelta(days=1)


async def cancel(session: Any, ids: Any, act: Act, *, tenant_id: str | None = None) -> list[Judged]:
    asked = Cancel(tenant_id=tenant_id, reason=act.reason)
    return [each async for batch in run_batch(session, asked, Who(Face.COMMAND, act.actor), ids) for each in batch]


async def reschedule(session: Any, ids: Any, at: datetime, act: Act, *, tenant_id: str | None = None) -> list[Judged]:
    asked = Reschedule(tenant_id=tenant_id, reason=act.reason, send_at=at)
    return [each async for batch in run_batch(session, asked, Who(Face.COMMAND, act.actor), ids) for each in batch]


def waiting(books: Books, **columns: Any) -> UUID:
    email_id = books.enqueue_one()
    usual = {"status": "waiting", "wait_until": TOMORROW, "wait_reason": "scheduled", "publish_due_at": None}
    books.change(email_id, **{**usual, **columns})
    return email_id


def audit(books: Books) -> list[dict[str, Any]]:
    return books.select("select * from operator_audit order by acted_at")


@pytest.mark.parametrize("status", ["pending", "waiting"])
async def test_a_cancelled_email_is_final_announced_and_audited(
    session: AsyncSession, books: Books, status: str
) -> None:
    books.connection.execute("update outgoing_feed set is_on = true")
    email_id = waiting(books) if status == "waiting" else books.enqueue_one()

    (changed,) = await cancel(session, [email_id], ACT)
    (again,) = await cancel(session, [email_id], ACT)

    row = books.row(email_id)
    assert changed == Judged(email_id, "cancelled", Status(status))
    assert again == Judged(email_id, "already_cancelled", Status.CANCELLED)
    assert (row["status"], row["error_type"], row["wait_until"], row["publish_due_at"]) == (
        *("cancelled", "cancelled", None, None),
    )
    (act,) = audit(books)
    assert (act["actor"], act["action"], act["reason"]) == ("ann@ops-1", "cancel", "<address> has paid")
    assert act["detail"] == {"attempts": 0, "from": status}
    (event,) = books.select("select * from outgoing_event")
    assert (event["kind"], event["reason"], event["email_id"]) == ("cancelled", "cancelled", email_id)


async def test_the_reason_of_a_cancelled_email_says_if_some_recipients_have_it(
    session: AsyncSession, books: Books
) -> None:
    books.connection.execute("update outgoing_feed set is_on = true")
    email_id = books.enqueue_one()
    books.change(email_id, recipient_outcomes='{"1": null}', attempt_base=1)

    (changed,) = await cancel(session, [email_id], ACT)

    row = books.row(email_id)
    assert changed.verdict == "cancelled"
    assert (row["status"], row["error_type"]) == ("cancelled", "partly_delivered")
    assert row["last_error"] == "The email was cancelled after it was delivered to some of its recipients."
    (event,) = books.select("select kind, reason from outgoing_event")
    assert event == {"kind": "cancelled", "reason": "partly_delivered"}


@pytest.mark.parametrize("status", ["sending", "sent", "failed", "held"])
async def test_it_is_too_late_for_an_email_with_another_status(
    session: AsyncSession, books: Books, status: str
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, status=status, publish_due_at=None)

    assert await cancel(session, [email_id], ACT) == [Judged(email_id, "too_late", Status(status))]
    assert await reschedule(session, [email_id], TOMORROW, ACT) == [Judged(email_id, "too_late", Status(status))]
    assert books.status(email_id) == status
    assert audit(books) == []


async def test_it_is_too_late_for_an_email_that_an_event_proves_to_be_sent(session: AsyncSession, books: Books) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, proven_by="ses")

    assert [each.verdict for each in await cancel(session, [email_id], ACT)] == ["too_late"]
    assert [each.verdict for each in await reschedule(session, [email_id], TOMORROW, ACT)] == ["too_late"]
    assert books.status(email_id) == "pending"


async def test_an_email_of_another_tenant_is_unknown(session: AsyncSession, books: Books) -> None:
    email_id, unknown = books.enqueue_one(), uuid4()

    found = await cancel(session, [email_id, unknown], ACT, tenant_id="another")

    assert found == [Judged(email_id, "unknown", None), Judged(unknown, "unknown", None)]
    assert books.status(email_id) == "pending"


async def test_a_lease_that_begins_first_wins(tables_url: str, session: AsyncSession, books: Books) -> None:
    email_id = books.enqueue_one()

    async with await connect_async(tables_url, name="worker") as worker, worker.transaction():
        await worker.execute(
            "update email_log set status = 'sending', lease_token = 1, publish_due_at = null where email_id = %s",
            [email_id],
        )
        cancelling = asyncio.create_task(cancel(session, [email_id], ACT))
        await until(lambda: books.waiting_for_a_lock("operator"))

    assert await cancelling == [Judged(email_id, "too_late", Status.SENDING)]
    assert books.status(email_id) == "sending"


async def test_a_release_that_ends_first_lets_the_email_be_cancelled(
    tables_url: str, session: AsyncSession, books: Books
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, status="sending", publish_due_at=None)

    async with await connect_async(tables_url, name="worker") as worker, worker.transaction():
        await worker.execute(
            "update email_log set status = 'pending', publish_due_at = now() where email_id = %s", [email_id]
        )
        cancelling = asyncio.create_task(cancel(session, [email_id], ACT))
        await until(lambda: books.waiting_for_a_lock("operator"))

    assert await cancelling == [Judged(email_id, "cancelled", Status.PENDING)]
    assert books.status(email_id) == "cancelled"


@pytest.mark.parametrize("change", ["cancel", "reschedule"])
async def test_a_message_that_rabbitmq_still_has_leases_nothing(
    tables_url: str, session: AsyncSession, books: Books, change: str
) -> None:
    email_id = books.enqueue_one()
    await (cancel(session, [email_id], ACT) if change == "cancel" else reschedule(session, [email_id], TOMORROW, ACT))

    pool = make_pool(tables_url, name="worker", size=1)
    await pool.open()
    store = LeaseStore(pool, worker="worker", slot="slot-1")
    leased = await store.lease(books.keys([email_id]), 60)
    await pool.close()

    assert leased == []


@pytest.mark.parametrize("status", ["pending", "waiting"])
async def test_a_rescheduled_email_waits_until_the_new_time(session: AsyncSession, books: Books, status: str) -> None:
    email_id = (
        waiting(books, wait_reason="redelivery", redelivery_count=4, attempt_count=7, attempt_base=7)
        if status == "waiting"
        else books.enqueue_one()
    )
    until_at = TOMORROW + timedelta(hours=3)

    (changed,) = await reschedule(session, [email_id], until_at, ACT)

    row = books.row(email_id)
    assert changed == Judged(email_id, "rescheduled", Status(status))
    assert (row["status"], row["wait_reason"], row["redelivery_count"]) == ("waiting", "scheduled", 0)
    assert (row["wait_until"], row["due_since"], row["publish_due_at"]) == (until_at, until_at, None)
    (act,) = audit(books)
    assert (act["action"], act["detail"]["from"]) == ("reschedule", status)
    assert datetime.fromisoformat(act["detail"]["send_at"]) == until_at


async def test_an_email_rescheduled_to_the_past_is_due_at_once(session: AsyncSession, books: Books) -> None:
    email_id = waiting(books)

    await reschedule(session, [email_id], datetime(2000, 1, 1, tzinfo=UTC), ACT)

    age = books.select("select clock_timestamp() - wait_until as age from email_log")[0]["age"]
    assert timedelta(0) <= age < timedelta(minutes=1)


async def test_an_email_that_expires_first_is_not_rescheduled(session: AsyncSession, books: Books) -> None:
    email_id = waiting(books, expires_at=TOMORROW + timedelta(hours=1))

    (changed,) = await reschedule(session, [email_id], TOMORROW + timedelta(hours=1), ACT)

    assert changed == Judged(email_id, "expires_first", Status.WAITING)
    assert books.row(email_id)["wait_until"] == TOMORROW


async def test_an_email_that_a_promotion_made_uncertain_is_not_rescheduled(session: AsyncSession, books: Books) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, publish_due_at=None, published_at=datetime(2026, 1, 1, tzinfo=UTC))
    books.connection.execute(
        "insert into relay_timeline (timeline, is_synchronous, uncertain_before) values (2, false, now())"
        " on conflict (is_only) do update set uncertain_before = now()"
    )

    (changed,) = await reschedule(session, [email_id], TOMORROW, ACT)

    assert changed == Judged(email_id, "too_late", Status.PENDING)
    assert books.status(email_id) == "pending"


async def test_a_locked_email_does_not_prevent_the_change_of_others(tables_url: str, books: Books) -> None:
    email_ids = books.enqueue(5)

    async with (
        await connect_async(tables_url, name="operator", lock_seconds=0.1) as operator,
        await connect_async(tables_url, name="left open") as other,
        other.transaction(),
    ):
        await other.execute("select from email_log where email_id = %s for update", [email_ids[2]])
        batches = [await cancel(operator, email_ids, ACT)]

    changes = [each.verdict for batch in batches for each in batch]
    assert changes == [*["cancelled"] * 2, "locked", *["cancelled"] * 2]
    assert books.statuses() == {"cancelled": 4, "pending": 1}


async def test_exactly_one_of_cancel_and_lease_wins(tables_url: str, books: Books) -> None:
    email_ids = books.enqueue(200)
    pool = make_pool(tables_url, name="worker", size=1)
    await pool.open()
    store = LeaseStore(pool, worker="worker", slot="slot-1")
    keys = books.keys(email_ids)

    async with await connect_async(tables_url, name="operator") as operator:

        async def cancel_each() -> list[Judged]:
            return [each for i in range(0, 200, 10) for each in await cancel(operator, email_ids[i : i + 10], ACT)]

        async def lease_each() -> list[Any]:
            backwards = list(reversed(email_ids))
            batches = [backwards[i : i + 10] for i in range(0, 200, 10)]
            return [lease for ids in batches for lease in await store.lease({i: keys[i] for i in ids}, 60)]

        changed, leases = await asyncio.gather(cancel_each(), lease_each())
    await pool.close()

    cancelled = {each.email_id for each in changed if each.verdict == "cancelled"}
    leased = {lease.email_id for lease in leases}
    assert cancelled | leased == set(email_ids)
    assert not cancelled & leased
    assert {each.email_id for each in changed if each.verdict == "too_late"} == leased
