"""Events are stored once; each proves that the provider accepted its email, whatever the email's status."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dispatcher.domain.address import mailbox_provider_of
from dispatcher.domain.email_id import new_email_ids
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.events.intake import EventIntake, Stored
from dispatcher.store.connections import Pool, connect_async, make_pool
from dispatcher.store.events import EventRow, store_events
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.store.books import Books
from tests.store.results import result
from tests.store.suppressing import hasher_of
from tests.waiting import until

AT = datetime(2026, 11, 23, 12, tzinfo=UTC)


def event(email_id: UUID, kind: EventKind = EventKind.DELIVERED, **fields: Any) -> ProviderEvent:
    """An event that SendGrid reported about the only recipient."""
    given = {"provider": "sendgrid", "happened_at": AT, "recipient": "ann@example.org"}
    return ProviderEvent(email_id=email_id, kind=kind, **{**given, **fields})


async def make(books: Books, store: LeaseStore, status: Status, *, provider: str = "sendgrid", **fields: Any) -> UUID:
    """An email with this status, as a worker records it after an attempt with this provider."""
    if status is Status.PENDING:
        return books.enqueue_tried(**fields)[0]
    email_id = books.enqueue_one(**fields)
    (lease,) = await store.lease(books.keys([email_id]), 60)
    if status is not Status.SENDING:
        error = "The connection was lost."
        await store.record([result(lease, status, provider=provider, error_type="outcome_unknown", error=error)])
    return email_id


async def test_an_event_is_stored_without_the_address(intake: EventIntake, books: Books) -> None:
    (email_id,) = books.enqueue_tried()
    bounced = event(
        email_id, EventKind.BOUNCED, bounce=Bounce.HARD, code="5.1.1", detail="ann@example.org: no such user"
    )

    assert await intake.store([bounced]) == Stored(new=1, settled=1)

    (row,) = books.select("select * from email_event")
    assert (row["email_id"], row["provider"], row["kind"], row["bounce"]) == (email_id, "sendgrid", "bounced", "hard")
    assert (row["code"], row["detail"], row["happened_at"]) == ("5.1.1", "<address>: no such user", AT)
    assert len(row["address_hash"]) == 16


async def test_repeated_events_and_events_of_unknown_emails_are_counted_and_left_out(
    intake: EventIntake, books: Books
) -> None:
    (email_id,) = books.enqueue_tried()
    delivered, opened = event(email_id), event(email_id, EventKind.OPENED)
    (unknown,) = new_email_ids(1)
    await intake.store([delivered])

    assert await intake.store([opened, event(unknown), delivered, opened]) == Stored(new=1, duplicates=2, unknown=1)
    assert books.count("email_event") == 2


@pytest.mark.parametrize("status", ["pending", "waiting", "sending", "failed", "held"])
async def test_an_event_about_an_email_that_was_delivered_in_part_does_not_settle_it(
    intake: EventIntake, books: Books, status: str
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, status=status, recipient_outcomes='{"1": null}')

    await intake.store([event(email_id)])

    row = books.row(email_id)
    assert (row["status"], row["proven_by"], books.count("email_event")) == (status, None, 1)


async def test_new_events_are_counted_by_the_recipients_mailbox_provider(books: Books, pool: Pool) -> None:
    (email_id,) = books.enqueue_tried(to=["ann@gmail.com", "Bob <bob@Outlook.co.uk>", "eve@example.org"])
    bounced = [
        event(email_id, EventKind.BOUNCED, bounce=Bounce.HARD, recipient=each)
        for each in ("ann@gmail.com", "Bob <bob@Outlook.co.uk>", "eve@example.org", None)
    ]
    rows = [EventRow.of(each, hasher_of(books.connection)) for each in bounced]

    stored = await store_events(pool, [*rows, rows[0]], SuppressionRules())
    again = await store_events(pool, rows, SuppressionRules())

    assert {each.mailbox: (each.new, each.duplicates) for each in stored} == {
        "gmail": (1, 1),
        "microsoft": (1, 0),
        "other": (1, 0),
        "unknown": (1, 0),
    }
    assert {each.mailbox: (each.new, each.duplicates) for each in again} == dict.fromkeys(
        ("gmail", "microsoft", "other", "unknown"), (0, 1)
    )


@pytest.mark.parametrize(
    ("address", "company"),
    [
        ("ann@googlemail.com", "gmail"),
        ("ann@hotmail.fr", "microsoft"),
        ("ann@live.com.mx", "microsoft"),
        ("ann@live.example.com", "other"),
        ("ann@yahoo.co.jp", "yahoo"),
        ("ann@aol.com", "yahoo"),
        ("ann@icloud.com", "apple"),
        ("ann@notgmail.com", "other"),
        (None, "unknown"),
    ],
)
def test_an_address_belongs_to_one_of_few_mailbox_providers(address: str | None, company: str) -> None:
    assert mailbox_provider_of(address) == company


async def test_no_events_need_no_database(intake: EventIntake, pool: Pool) -> None:
    await pool.close()

    assert await intake.store([]) == Stored()


@pytest.mark.parametrize("status", [Status.PENDING, Status.FAILED, Status.HELD])
@pytest.mark.parametrize("kind", [EventKind.ACCEPTED, EventKind.BOUNCED, EventKind.CLICKED])
async def test_an_event_proves_that_an_unsent_email_was_sent(
    intake: EventIntake, books: Books, store: LeaseStore, status: Status, kind: EventKind
) -> None:
    email_id = await make(books, store, status)
    bounce = Bounce.SOFT if kind is EventKind.BOUNCED else None

    assert await intake.store([event(email_id, kind, bounce=bounce)]) == Stored(new=1, settled=1)

    row = books.row(email_id)
    assert (row["status"], row["provider"], row["proven_by"]) == ("sent", "sendgrid", "sendgrid")
    assert row["sent_at"] is not None
    assert (row["publish_due_at"], row["dead_letter_due_at"], row["error_type"]) == (None, None, None)
    assert books.hourly()["accepted"] == 1
    (act,) = books.select("select actor, action, detail from operator_audit")
    assert (act["actor"], act["action"]) == ("evidence:sendgrid", "settle")
    assert (act["detail"]["from"], act["detail"]["to"]) == (status, "sent")


async def test_an_event_changes_nothing_about_a_sent_email(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    email_id = await make(books, store, Status.SENT)
    before = books.row(email_id)

    assert await intake.store([event(email_id)]) == Stored(new=1)
    assert books.row(email_id) == before


@pytest.mark.parametrize("status", [Status.SENT, Status.PENDING, Status.FAILED, Status.HELD])
async def test_an_event_during_a_lease_waits_for_the_worker_and_then_settles_the_email(
    intake: EventIntake, books: Books, store: LeaseStore, tables_url: str, status: Status
) -> None:
    email_id = books.enqueue_one()
    (lease,) = await store.lease(books.keys([email_id]), 60)

    assert await intake.store([event(email_id)]) == Stored(new=1)
    assert books.status(email_id) == "sending"

    assert await store.record([result(lease, status)]) == {email_id}
    assert await store.lease(books.keys([email_id]), 60) == []
    async with await connect_async(tables_url, name="test relay") as session:
        await Outbox(session).settle_proven(10)
    assert books.status(email_id) == "sent"
    assert books.count("operator_audit") == (status is not Status.SENT)


async def test_a_marked_email_is_never_leased(intake: EventIntake, books: Books, store: LeaseStore) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, proven_by="sendgrid")

    assert await store.lease(books.keys([email_id]), 60) == []
    assert await store.lease_without_content(email_id, books.key(email_id), 60) is None
    assert (await store.find_unleased([email_id]))[email_id].is_left_out


async def test_a_released_email_is_not_sent_again_after_an_event(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    email_id = await make(books, store, Status.HELD)
    books.change(email_id, status="pending", publish_due_at=AT)

    assert (await intake.store([event(email_id)])).settled == 1
    assert await store.lease(books.keys([email_id]), 60) == []
    assert books.status(email_id) == "sent"


async def test_a_held_email_that_the_provider_dropped_fails(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    email_id = await make(books, store, Status.HELD)
    books.change(email_id, dead_letter_due_at=None)

    stored = await intake.store([event(email_id, EventKind.REJECTED, code="550", detail="Bounced Address")])

    row = books.row(email_id)
    assert stored == Stored(new=1, settled=1)
    assert (row["status"], row["error_type"], row["proven_by"]) == ("failed", "dropped_by_provider", None)
    assert row["last_error"] == "The provider accepted the email, then dropped it: 550 Bounced Address"
    assert row["dead_letter_due_at"] is not None


async def test_a_dropped_email_may_be_sent_again(intake: EventIntake, books: Books, store: LeaseStore) -> None:
    (email_id,) = books.enqueue_tried()
    books.change(email_id, publish_due_at=None)

    assert await intake.store([event(email_id, EventKind.REJECTED)]) == Stored(new=1)

    assert books.row(email_id)["publish_due_at"] is not None
    (lease,) = await store.lease(books.keys([email_id]), 60)
    assert lease.email_id == email_id


@pytest.mark.parametrize("later", [EventKind.ACCEPTED, EventKind.REJECTED])
async def test_a_late_acceptance_does_not_revive_a_dropped_email(
    intake: EventIntake, books: Books, store: LeaseStore, later: EventKind
) -> None:
    email_id = await make(books, store, Status.HELD)
    await intake.store([event(email_id, EventKind.REJECTED)])

    assert (await intake.store([event(email_id, later, happened_at=AT + timedelta(seconds=1))])).settled == 0
    assert books.status(email_id) == "failed"
    assert books.row(email_id)["proven_by"] is None


async def test_a_delivery_proves_that_a_dropped_email_was_sent(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    email_id = await make(books, store, Status.HELD)
    await intake.store([event(email_id, EventKind.REJECTED)])

    await intake.store([event(email_id, EventKind.DELIVERED)])

    assert books.status(email_id) == "sent"


async def test_an_email_is_sent_if_only_one_of_several_recipients_was_dropped(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    both = ["ann@example.org", "bob@example.org"]
    one_dropped = await make(books, store, Status.HELD, to=both)
    all_dropped = await make(books, store, Status.HELD, to=both)
    whole_dropped = await make(books, store, Status.HELD, to=both)

    await intake.store(
        [
            event(one_dropped, EventKind.REJECTED),
            *(event(all_dropped, EventKind.REJECTED, recipient=address) for address in both),
            event(whole_dropped, EventKind.REJECTED, recipient=None),
        ]
    )

    statuses = [books.status(email_id) for email_id in (one_dropped, all_dropped, whole_dropped)]
    assert statuses == ["sent", "failed", "failed"]


async def test_events_of_other_emails_are_stored_while_a_row_is_locked(books: Books, tables_url: str) -> None:
    locked, free = books.enqueue_tried(2)
    pool = make_pool(tables_url, name="intake", size=1, lock_seconds=0.2)
    await pool.open()
    events = [event(locked), event(free)]
    with psycopg.connect(tables_url) as other:
        Books(other).lock(locked)

        with pytest.raises(StoreBusy, match="1 emails"):
            await EventIntake(pool, SuppressionRules()).store(events)
        assert (books.status(locked), books.status(free)) == ("pending", "sent")

    assert await EventIntake(pool, SuppressionRules()).store(events) == Stored(new=1, duplicates=1, settled=1)
    await pool.close()


async def test_one_event_that_postgresql_refuses_does_not_stop_the_others(intake: EventIntake, books: Books) -> None:
    bad, good = books.enqueue_tried(2)

    stored = await intake.store([event(bad, provider="nul\0"), event(good)])

    assert stored == Stored(new=1, settled=1)
    assert (books.status(bad), books.status(good)) == ("pending", "sent")


async def test_no_event_is_left_out_if_the_statement_itself_is_at_fault(intake: EventIntake, books: Books) -> None:
    events = [event(email_id) for email_id in books.enqueue_tried(2)]
    books.connection.execute("alter table email_event alter column detail type integer using null")
    try:
        with pytest.raises(StoreUnavailable, match="42804"):
            await intake.store(events)
    finally:
        books.connection.execute("alter table email_event alter column detail type text using null")

    assert await intake.store(events) == Stored(new=2, settled=2)


async def test_intakes_that_store_the_same_events_at_once_do_not_deadlock(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    email_ids = books.enqueue_tried(50)
    events = [event(email_id) for email_id in email_ids]

    parts = await asyncio.gather(intake.store(events), intake.store(events[::-1]))

    assert sum(part.new for part in parts) == 50
    assert books.statuses() == {"sent": 50}
    assert books.hourly()["accepted"] == 50


async def test_an_event_waits_for_a_record_in_progress_and_then_changes_nothing(
    intake: EventIntake, books: Books, store: LeaseStore, tables_url: str
) -> None:
    email_id = await make(books, store, Status.SENDING)
    with psycopg.connect(tables_url) as recording:
        recording.execute("update email_log set status = 'sent', sent_at = now() where email_id = %s", [email_id])
        storing = asyncio.create_task(intake.store([event(email_id)]))
        await until(lambda: books.waiting_for_a_lock("worker-1"))

    assert await storing == Stored(new=1)
    assert books.row(email_id)["proven_by"] is None
