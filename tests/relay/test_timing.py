"""The relay wakes scheduled emails when their time has come, and cancels emails that have expired."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.domain.status import Status
from dispatcher.relay.timing import BATCH, ExpiredEmails, WaitingEmails
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.supervisor.relay_process import leader_services
from tests.broker.rabbit import Rabbit
from tests.relay.running import Start, next_round
from tests.store.books import Books
from tests.store.results import result
from tests.waiting import until

PAST = datetime(2026, 1, 1, tzinfo=UTC)


def soon(**more: float) -> datetime:
    return datetime.now(UTC) + timedelta(**(more or {"hours": 1}))


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[Outbox]:
    """The relay's statements."""
    async with await connect_async(tables_url, name="test relay") as session:
        yield Outbox(session)


def expire(books: Books, *email_ids: object) -> None:
    """Lets emails expire."""
    books.connection.execute("update email_log set expires_at = %s where email_id = any(%s)", [PAST, list(email_ids)])


async def test_a_scheduled_email_is_published_at_its_time_and_not_before(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await start(settings)
    send_at = soon(seconds=0.8)
    scheduled, now = books.enqueue_one(send_at=send_at), books.enqueue_one()
    row = books.row(scheduled)
    assert (row["status"], row["wait_until"], row["wait_reason"]) == ("waiting", send_at, "scheduled")
    assert (row["due_since"], row["publish_due_at"]) == (send_at, None)

    first, second = await rabbit.take_all(settings.queue, 2)

    assert [first.pointer.email_id, second.pointer.email_id] == [now, scheduled]
    row = books.row(scheduled)
    assert (row["status"], row["wait_until"]) == ("pending", None)
    became_due = row["published_at"] or row["publish_due_at"]
    assert timedelta(0) <= became_due - send_at < timedelta(seconds=2)


async def test_an_email_whose_send_at_has_passed_is_due_at_once(books: Books) -> None:
    row = books.row(books.enqueue_one(send_at=PAST))

    assert (row["status"], row["wait_until"], row["publish_due_at"] is None) == ("pending", None, False)


async def test_many_emails_of_one_second_are_woken_in_batches_between_which_the_relay_publishes(
    outbox: Outbox, books: Books
) -> None:
    books.enqueue(BATCH + 3, send_at=soon())
    books.connection.execute("update email_log set wait_until = %s", [PAST])
    service = WaitingEmails(outbox)

    assert await service.run_once() == 0.0, "the relay publishes a batch, then wakes the next one"
    assert books.statuses() == {"pending": BATCH, "waiting": 3}
    assert await service.run_once() > 0
    assert books.statuses() == {"pending": BATCH + 3}
    due = [row["publish_due_at"] for row in books.rows()]
    assert len(set(due)) == len(due), "the relay continues a scan from an instant"


async def test_the_service_runs_again_when_the_next_email_is_due(outbox: Outbox, books: Books) -> None:
    service = WaitingEmails(outbox)
    assert await service.run_once() == service.interval_seconds
    books.enqueue_one(send_at=soon())
    assert await service.run_once() == service.interval_seconds
    books.enqueue_one(send_at=soon(seconds=0.2))

    assert await service.run_once() <= 0.2


async def test_a_locked_email_does_not_keep_others_waiting_or_uncancelled(
    outbox: Outbox, books: Books, tables_url: str
) -> None:
    waiting, locked = books.enqueue(2, send_at=soon())
    expired, also_locked = books.enqueue(2)
    books.connection.execute("update email_log set wait_until = %s where status = 'waiting'", [PAST])
    expire(books, expired, also_locked)
    with psycopg.connect(tables_url) as other:
        Books(other).lock(locked)
        Books(other).lock(also_locked)

        assert await outbox.wake(10) == 1
        assert [each.email_id for each in await outbox.cancel_expired(10)] == [expired]

    assert books.status(waiting) == "pending"
    assert (books.status(locked), books.status(also_locked)) == ("waiting", "pending")


async def test_an_expired_email_is_not_published_even_before_it_is_cancelled(outbox: Outbox, books: Books) -> None:
    expired, due = books.enqueue(2)
    expire(books, expired)

    assert [row.email_id for row in await outbox.find_publish_due(10)] == [due]


async def test_the_relay_cancels_an_email_that_expires_before_it_is_sent(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await start(settings)
    scheduled = books.enqueue_one(send_at=soon(), expires_at=soon(hours=2))
    other = books.enqueue_one()
    expire(books, scheduled)

    await until(lambda: books.status(scheduled) == "cancelled")

    row = books.row(scheduled)
    assert (row["error_type"], row["wait_until"], row["publish_due_at"]) == ("expired", None, None)
    assert row["dead_letter_due_at"] is None
    await next_round(books)
    (message,) = await rabbit.take_all(settings.queue, 1)
    assert message.pointer.email_id == other


async def test_a_held_email_delivered_in_part_is_cancelled_when_it_expires(outbox: Outbox, books: Books) -> None:
    email_id = books.enqueue_one(expires_at=soon())
    books.change(email_id, status=Status.HELD, recipient_outcomes='{"1": null}', attempt_base=1)
    expire(books, email_id)

    (cancelled,) = await outbox.cancel_expired(10)

    row = books.row(email_id)
    assert (cancelled.email_id, row["status"], row["error_type"]) == (email_id, "cancelled", "partly_delivered")
    assert "unknown" in row["last_error"]


@pytest.mark.parametrize("status", [Status.PENDING, Status.WAITING])
async def test_an_email_that_expires_after_some_recipients_got_it_is_cancelled_and_its_reason_says_so(
    outbox: Outbox, books: Books, status: Status
) -> None:
    email_id = books.enqueue_one(expires_at=soon())
    books.change(email_id, status=status, recipient_outcomes='{"1": null}', attempt_base=1)
    expire(books, email_id)

    (cancelled,) = await outbox.cancel_expired(10)

    row = books.row(email_id)
    assert (cancelled.email_id, row["status"], row["error_type"]) == (email_id, "cancelled", "partly_delivered")
    assert row["last_error"] == "The email expired after it was delivered to some of its recipients."
    assert (row["wait_until"], row["dead_letter_due_at"]) == (None, None)


async def test_a_held_email_that_expires_needs_no_operator_any_more(
    outbox: Outbox, store: LeaseStore, books: Books
) -> None:
    email_id = books.enqueue_one(expires_at=soon())
    (lease,) = await store.lease(books.keys([email_id]), 60)
    await store.record([result(lease, Status.HELD)])
    assert books.row(email_id)["dead_letter_due_at"] is not None
    expire(books, email_id)

    (cancelled,) = await outbox.cancel_expired(10)

    assert (cancelled.email_id, cancelled.previous_status) == (email_id, Status.HELD)
    row = books.row(email_id)
    assert (row["status"], row["error_type"], row["dead_letter_due_at"]) == ("cancelled", "expired", None)
    assert row["was_uncertain"]
    assert "unknown" in row["last_error"]
    (audit,) = books.select("select * from operator_audit where email_id = %s", email_id)
    assert (audit["actor"], audit["action"]) == ("expiry", "cancel")


async def test_a_late_acceptance_of_a_cancelled_or_waiting_email_proves_that_it_was_sent(
    store: LeaseStore, books: Books
) -> None:
    expired, waiting = books.enqueue(2, expires_at=soon())
    leases = await store.lease(books.keys([expired, waiting]), 60)
    books.change(expired, status="cancelled", locked_until=PAST)
    books.change(waiting, status="waiting", wait_until=soon(), locked_until=PAST)

    await store.record([result(lease, Status.SENT) for lease in leases])

    assert books.statuses() == {"sent": 2}


@pytest.mark.parametrize("status", ["sending", "sent", "failed", "cancelled"])
async def test_no_other_status_expires(outbox: Outbox, books: Books, status: str) -> None:
    email_id = books.enqueue_one(expires_at=soon())
    books.change(email_id, status=status, expires_at=PAST)

    assert await outbox.cancel_expired(10) == []
    assert books.status(email_id) == status


async def test_expiry_waits_for_evidence_that_is_being_settled(outbox: Outbox, books: Books) -> None:
    email_id = books.enqueue_one(expires_at=soon())
    books.change(email_id, expires_at=PAST, proven_by="ses")

    assert await outbox.cancel_expired(10) == []
    (settled,) = await outbox.settle_proven(10)
    assert (settled.email_id, settled.status) == (email_id, Status.SENT)


@pytest.mark.parametrize("status", ["waiting", "cancelled"])
async def test_evidence_makes_a_waiting_or_cancelled_email_sent(outbox: Outbox, books: Books, status: str) -> None:
    email_id = books.enqueue_one()
    wait_until = soon() if status == "waiting" else None
    books.change(email_id, status=status, wait_until=wait_until, publish_due_at=None, proven_by="ses")

    await outbox.settle_proven(10)

    row = books.row(email_id)
    assert (row["status"], row["wait_until"]) == ("sent", None)


def test_every_relay_that_leads_wakes_and_cancels(settings: Settings) -> None:
    services = leader_services(settings, Publisher.__new__(Publisher), lambda: ())(Outbox.__new__(Outbox))

    assert {ExpiredEmails, WaitingEmails} <= {type(service) for service in services.by_due_rows}
