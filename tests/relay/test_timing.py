"""The relay wakes emails that wait, scheduled or for a domain, when their time has come, and cancels expired emails."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from dispatcher.domain.controls import DomainLimit
from dispatcher.domain.status import Status
from dispatcher.relay import domain_waits
from dispatcher.relay.domain_waits import DomainWaits
from dispatcher.relay.timing import BATCH, WaitingEmails
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.relay.running import Relay, next_round
from tests.store.books import Books
from tests.store.results import lease_one, result
from tests.waiting import until

PAST = datetime(2026, 1, 1, tzinfo=UTC)
DOMAIN = "example.org"
Ceilings = tuple[float | None, int | None] | tuple[float | None, int | None, float]


def soon(**more: float) -> datetime:
    return datetime.now(UTC) + timedelta(**(more or {"hours": 1}))


def expire(books: Books, *email_ids: object) -> None:
    books.connection.execute("update email_log set expires_at = %s where email_id = any(%s)", [PAST, list(email_ids)])


async def test_a_scheduled_email_is_published_at_its_time_and_not_before(relay: Relay) -> None:
    await relay.start()
    send_at = soon(seconds=0.8)
    scheduled, now = relay.books.enqueue_one(send_at=send_at), relay.books.enqueue_one()
    row = relay.books.row(scheduled)
    assert (row["status"], row["wait_until"], row["wait_reason"]) == ("waiting", send_at, "scheduled")
    assert (row["due_since"], row["publish_due_at"]) == (send_at, None)

    assert await relay.take(2) == [now, scheduled]

    row = relay.books.row(scheduled)
    assert (row["status"], row["wait_until"]) == ("pending", None)
    became_due = row["published_at"] or row["publish_due_at"]
    assert timedelta(0) <= became_due - send_at < timedelta(seconds=2)


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


async def test_a_locked_email_does_not_keep_others_waiting_or_uncancelled(outbox: Outbox, books: Books) -> None:
    waiting, locked = books.enqueue(2, send_at=soon())
    expired, also_locked = books.enqueue(2)
    books.connection.execute("update email_log set wait_until = %s where status = 'waiting'", [PAST])
    expire(books, expired, also_locked)

    with books.locked(locked, also_locked):
        assert await outbox.wake(10) == 1
        assert [each.email_id for each in await outbox.cancel_expired(10)] == [expired]

    assert books.status(waiting) == "pending"
    assert (books.status(locked), books.status(also_locked)) == ("waiting", "pending")


async def test_an_expired_email_is_not_published_even_before_it_is_cancelled(outbox: Outbox, books: Books) -> None:
    expired, due = books.enqueue(2)
    expire(books, expired)

    assert [row.email_id for row in await outbox.find_publish_due(10)] == [due]


async def test_the_relay_cancels_an_email_that_expires_before_it_is_sent(relay: Relay) -> None:
    await relay.start()
    scheduled = relay.books.enqueue_one(send_at=soon(), expires_at=soon(hours=2))
    other = relay.books.enqueue_one()
    expire(relay.books, scheduled)

    await until(lambda: relay.books.status(scheduled) == "cancelled")

    row = relay.books.row(scheduled)
    assert (row["error_type"], row["wait_until"], row["publish_due_at"]) == ("expired", None, None)
    assert row["dead_letter_due_at"] is None
    await next_round(relay.books)
    assert await relay.take(1) == [other]


@pytest.mark.parametrize("status", [Status.PENDING, Status.WAITING, Status.HELD])
async def test_an_email_that_expires_after_some_recipients_got_it_is_cancelled_and_its_reason_says_so(
    outbox: Outbox, books: Books, status: Status
) -> None:
    email_id = books.enqueue_one(expires_at=soon())
    books.change(email_id, status=status, recipient_outcomes='{"1": null}', attempt_base=1)
    expire(books, email_id)

    (cancelled,) = await outbox.cancel_expired(10)

    row = books.row(email_id)
    assert (cancelled.email_id, row["status"], row["error_type"]) == (email_id, "cancelled", "partly_delivered")
    assert (row["wait_until"], row["dead_letter_due_at"]) == (None, None)
    known = row["last_error"] == "The email expired after it was delivered to some of its recipients."
    assert known or (status is Status.HELD and "unknown" in row["last_error"])


async def test_a_held_email_that_expires_needs_no_operator(outbox: Outbox, store: LeaseStore, books: Books) -> None:
    lease = await lease_one(store, books, expires_at=soon())
    email_id, pending = lease.email_id, books.enqueue_one(expires_at=soon())
    await store.record([result(lease, Status.HELD)])
    assert books.row(email_id)["dead_letter_due_at"] is not None
    expire(books, email_id, pending)

    (cancelled,) = [each for each in await outbox.cancel_expired(10) if each.email_id != pending]

    assert (cancelled.email_id, cancelled.previous_status) == (email_id, Status.HELD)
    row = books.row(email_id)
    assert (row["status"], row["error_type"], row["dead_letter_due_at"]) == ("cancelled", "expired", None)
    assert row["was_uncertain"]
    assert "unknown" in row["last_error"]
    (audit,) = books.select("select * from operator_audit")  # the other email needed no decision
    assert (audit["actor"], audit["action"]) == ("expiry", "cancel")


async def test_no_other_status_expires_and_expiry_waits_for_evidence_that_is_being_settled(
    outbox: Outbox, books: Books
) -> None:
    statuses = ["sending", "sent", "failed", "cancelled", "pending"]
    emails = books.enqueue(5, expires_at=soon())
    for email_id, status in zip(emails, statuses, strict=True):
        books.change(email_id, status=status, expires_at=PAST, proven_by="ses" if status == "pending" else None)

    assert await outbox.cancel_expired(10) == []
    assert [row["status"] for row in books.rows()] == statuses
    assert [(each.email_id, each.status) for each in await outbox.settle_proven(10)] == [(emails[-1], Status.SENT)]


@pytest.mark.parametrize("status", ["waiting", "cancelled"])
async def test_evidence_makes_a_waiting_or_cancelled_email_sent(outbox: Outbox, books: Books, status: str) -> None:
    email_id = books.enqueue_one()
    wait_until = soon() if status == "waiting" else None
    books.change(email_id, status=status, wait_until=wait_until, publish_due_at=None, proven_by="ses")

    await outbox.settle_proven(10)

    row = books.row(email_id)
    assert (row["status"], row["wait_until"]) == ("sent", None)


# After an operator raised or removed the ceiling of a recipient domain, the emails that wait for it come earlier.
def make_wait(books: Books, count: int, *, domain: str = DOMAIN) -> list[UUID]:
    """Enqueues emails that wait for a domain's ceiling, 100 seconds apart."""
    email_ids = books.enqueue(count)
    books.connection.execute(
        "update email_log set status = 'waiting', publish_due_at = null, wait_reason = 'domain', wait_domain = %s,"
        " wait_until = clock_timestamp() + 100 * array_position(%s::uuid[], email_id) * interval '1 second'"
        " where email_id = any(%s)",
        [domain, email_ids, email_ids],
    )
    return email_ids


def seconds_left(books: Books, email_id: UUID) -> float:
    wait_until: datetime = books.row(email_id)["wait_until"]
    return (wait_until - datetime.now(UTC)).total_seconds()


async def apply(waits: DomainWaits, *ceilings: Ceilings) -> int:
    """Sets ceilings of the domain one after the other; then `finish`."""
    for each in ceilings:
        waits.set_limits({DOMAIN: DomainLimit(DOMAIN, *each)})
    return await finish(waits)


async def finish(waits: DomainWaits) -> int:
    """Runs rounds until nothing is left to do; returns how many."""
    rounds = 1
    while await waits.run_once() == 0.0:
        rounds += 1
    return rounds


async def test_emails_are_due_when_the_ceiling_of_their_domain_is_removed(outbox: Outbox, books: Books) -> None:
    free, kept = make_wait(books, 3), make_wait(books, 3, domain="other.example")
    (scheduled,) = books.enqueue(1, send_at=datetime.now(UTC) + timedelta(hours=1))
    waits = DomainWaits(outbox)
    limits = {each: DomainLimit(each, 1.0) for each in (DOMAIN, "other.example")}
    waits.set_limits(limits)
    await finish(waits)
    assert seconds_left(books, free[0]) > 50

    waits.set_limits({"other.example": limits["other.example"]})
    await finish(waits)

    assert all(seconds_left(books, each) <= 0 for each in free)
    assert all(seconds_left(books, each) > 50 for each in [*kept, scheduled])
    assert await waits.run_once() is None, "woken or not, their waits are ended once"


async def test_a_new_leader_finds_emails_whose_ceiling_was_removed_before(outbox: Outbox, books: Books) -> None:
    (email_id,) = make_wait(books, 1)
    waits = DomainWaits(outbox)
    await finish(waits)
    assert seconds_left(books, email_id) > 50, "the ceilings are not read yet"

    waits.set_limits({})
    await finish(waits)

    assert seconds_left(books, email_id) <= 0


async def test_a_higher_ceiling_shortens_waits_and_waiting_groups_in_proportion_and_a_lower_one_changes_nothing(
    outbox: Outbox, books: Books
) -> None:
    first, second = make_wait(books, 2)
    books.connection.execute(
        "insert into domain_line values (%s, 'normal', 'acme', now() + interval '200 s')", [DOMAIN]
    )
    waits = DomainWaits(outbox)
    await apply(waits, (1.0, None), (0.5, None))
    assert 90 < seconds_left(books, first) <= 100

    await apply(waits, (1.0, None), (10.0, None))

    # From 0.5 to 1 to 10 emails per second.
    assert 4 < seconds_left(books, first) <= 5
    assert 9 < seconds_left(books, second) <= 10
    (group,) = books.select("select extract(epoch from until_at - now())::float8 as seconds from domain_line")
    assert 9 < group["seconds"] <= 10


async def test_many_waits_are_shortened_in_batches(outbox: Outbox, books: Books) -> None:
    email_ids = make_wait(books, domain_waits.BATCH + 1)

    assert await apply(DomainWaits(outbox), (1.0, None), (2.0, None)) == 2
    assert seconds_left(books, email_ids[-1]) == pytest.approx(50 * (domain_waits.BATCH + 1), abs=30)


@pytest.mark.parametrize(
    ("before", "now", "part"),
    [
        ((1, None), (4, None), 0.25), ((4, None), (1, None), 1.0), ((None, 2), (None, 8), 0.25), ((1, 2), (2, 2), 0.5),
        ((4, 2), (8, 2), 1.0), ((1, 2), (2, 8), 0.5), ((1, 2), (2, None), 0.5), ((1, None), (1, 5), 1.0),
        # Attempts became shorter or longer than the second that is assumed before the first one.
        ((None, 2), (None, 2, 0.1), 0.1), ((None, 2, 0.1), (None, 2, 0.04), 0.4), ((4, 2), (4, 2, 0.1), 0.5),
        ((None, 2, 0.1), (None, 2, 0.06), 1.0), ((None, 2, 0.1), (None, 2, 5.0), 1.0), ((1, 2), (1, 2, 0.1), 1.0),
        ((None, 2, 0.1), (None, 3, 0.1), 2 / 3),
    ],
)  # fmt: skip
async def test_the_part_of_a_wait_that_is_left(
    outbox: Outbox, books: Books, before: Ceilings, now: Ceilings, part: float
) -> None:
    (email_id,) = make_wait(books, 1)

    await apply(DomainWaits(outbox), before, now)

    assert seconds_left(books, email_id) == pytest.approx(100 * part, abs=5)


async def test_the_leading_relay_publishes_them_within_two_seconds(relay: Relay) -> None:
    relay.books.connection.execute("insert into domain_limit (domain, per_second) values (%s, 1)", [DOMAIN])
    (email_id,) = make_wait(relay.books, 1)
    await relay.start()
    await relay.leads()

    relay.books.connection.execute("delete from domain_limit")

    await until(lambda: relay.books.status(email_id) == "pending", seconds=2)
