"""The outbox finds due emails in order, marks them only if they are unchanged, and recovers expired leases."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from dispatcher.domain.status import OnUncertain, Status
from dispatcher.store.instants import AHEAD_SECONDS, EARLIEST, LATEST
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import DueRange, Outbox
from tests.store.books import Books
from tests.store.results import lease_some, result
from tests.waiting import until_answer

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)
HOLD, RESEND = OnUncertain.HOLD, OnUncertain.RESEND


async def test_the_longest_due_emails_come_first_up_to_the_limit(outbox: Outbox, books: Books) -> None:
    *email_ids, later = books.enqueue(6)
    for number, email_id in enumerate(email_ids):
        books.change(email_id, publish_due_at=EXPIRED - timedelta(hours=number))
    books.change(later, publish_due_at=datetime.now(UTC) + timedelta(minutes=4))

    due = await outbox.find_publish_due(3)
    since = EXPIRED - timedelta(hours=2)
    continued = await outbox.find_due_of_tenants([DueRange(("normal", "default"), since, LATEST, 2)])

    assert [row.email_id for row in due] == email_ids[:1:-1]
    assert [row.email_id for row in continued] == email_ids[2:0:-1]
    assert {row.email_id for row in await outbox.find_publish_due(10)} == set(email_ids)


@pytest.mark.parametrize("due_at", [EXPIRED, LATEST - timedelta(days=1)])
async def test_a_page_of_emails_whose_message_keys_are_too_long_for_a_message_hides_no_other_email(
    outbox: Outbox, books: Books, due_at: datetime
) -> None:
    unfit, fit = books.enqueue(2), books.enqueue_one()
    for email_id in unfit:
        books.change(email_id, message_key="k" * 256, publish_due_at=due_at)
    books.change(fit, message_key="\N{FOX FACE}" * 255, publish_due_at=due_at + timedelta(seconds=1))

    found = [
        await outbox.find_publish_due(2),
        await outbox.find_due_of_tenants([DueRange(("normal", "default"), EARLIEST, LATEST, 2)]),
    ]

    assert [[row.email_id for row in rows] for rows in found] == [[fit], [fit]]


async def test_texts_that_are_longer_than_a_message_takes_are_not_read(outbox: Outbox, books: Books) -> None:
    longest, longer, dead = books.enqueue(3)
    books.change(longest, correlation_id="\N{FOX FACE}" * 63 + "abc")
    books.change(longer, correlation_id="c" * 256)
    dead_columns = dict.fromkeys(("message_key", "correlation_id", "error_type", "last_error", "provider"), "x" * 4001)
    books.change(dead, status="failed", publish_due_at=None, dead_letter_due_at=EXPIRED, **dead_columns)
    ranges = [DueRange(("normal", "default"), EARLIEST, LATEST, 10)]

    for due in (await outbox.find_publish_due(10), await outbox.find_due_of_tenants(ranges)):
        assert [row.correlation_id for row in due] == ["\N{FOX FACE}" * 63 + "abc", None]
    (letter,) = await outbox.find_dead_letter_due(10)
    assert {len(getattr(letter, each)) for each in ("message_key", "correlation_id", "error_type", "error")} == {4000}


async def test_the_lanes_and_tenants_with_due_emails_are_found(outbox: Outbox, books: Books) -> None:
    for tenant_id in ("b", "a", "b"):
        books.enqueue(3, tenant_id=tenant_id)
    books.change(books.enqueue_one(tenant_id="a"), lane="urgent")
    books.change(books.enqueue_one(tenant_id="c"), publish_due_at=None)

    assert await outbox.find_due_tenants() == [("normal", "a"), ("normal", "b"), ("urgent", "a")]
    assert await outbox.find_due_tenants(["normal"]) == [("urgent", "a")]


async def test_only_published_emails_that_have_not_changed_since_are_marked_up_to_five_hundred_at_once(
    outbox: Outbox, store: LeaseStore, books: Books
) -> None:
    released, leased, unroutable, *published = books.enqueue(500)
    due = {row.email_id: row.due_at for row in await outbox.find_publish_due(500)}
    assert len(set(due.values())) > 1, "emails that are enqueued together are due at different instants"
    leases = await store.lease(books.keys([released, leased]), 60)
    await store.release({lease.email_id: lease.token for lease in leases if lease.email_id == released})
    before = books.row(leased)

    await outbox.mark_published({email_id: at for email_id, at in due.items() if email_id != unroutable})

    assert {row.email_id for row in await outbox.find_publish_due(500)} == {released, unroutable}
    assert books.row(leased) == before
    assert books.row(unroutable)["published_at"] is None
    assert all(row["published_at"] for row in books.rows() if row["email_id"] in published)


@pytest.mark.parametrize(
    ("own", "default", "status"),
    [(None, HOLD, "held"), (None, RESEND, "pending"), (HOLD, RESEND, "held"), (RESEND, HOLD, "pending")],
)
async def test_an_expired_lease_is_recovered_by_the_emails_policy_or_else_the_hosts(
    outbox: Outbox, store: LeaseStore, books: Books, own: OnUncertain | None, default: OnUncertain, status: str
) -> None:
    email_id = books.enqueue_one(on_uncertain=own)
    (lease,) = await store.lease(books.keys([email_id]), 60)
    books.change(email_id, locked_until=EXPIRED)

    (rescued,) = await outbox.recover_expired(default, 5, await outbox.find_expiring())

    assert (rescued.email_id, rescued.status, rescued.attempt_count) == (email_id, status, 1)
    row = books.row(email_id)
    assert (row["status"], row["error_type"], row["locked_by"]) == (status, "outcome_unknown", None)
    assert (row["dead_letter_due_at"] is None, row["publish_due_at"] is None) == (status == "pending", status == "held")
    assert await store.renew({email_id: lease.token}, 60) == set()
    # The worker that had the lease returns with a rejection. A rejection is evidence for a held email, but has no
    # effect on an email that became due again.
    assert await store.record([result(lease, Status.FAILED)]) == set()
    assert books.status(email_id) == ("failed" if status == "held" else "pending")


@pytest.mark.parametrize(
    ("own", "host", "status", "channel"), [(1, 5, "held", None), (1, 5, "held", "test"), (5, 1, "pending", None)]
)
async def test_an_email_has_the_attempts_of_its_row_and_not_the_hosts_and_a_test_has_no_dead_letter(
    outbox: Outbox, store: LeaseStore, books: Books, own: int, host: int, status: str, channel: str | None
) -> None:
    expired, lost = books.enqueue(2)
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    await store.lease(books.keys([expired]), 60)
    books.change(expired, max_attempts=own, locked_until=long_ago, channel=channel)
    books.change(lost, max_attempts=own, attempt_count=1, publish_due_at=None, published_at=long_ago, channel=channel)
    books.connection.execute(
        "insert into relay_timeline (timeline, is_synchronous, uncertain_before, doubted_at)"
        " values (1, false, clock_timestamp(), clock_timestamp() - interval '1 hour')"
    )

    await outbox.recover_expired(OnUncertain.RESEND, host, await outbox.find_expiring())
    await outbox.republish_lost(["normal"], 1, 100, OnUncertain.RESEND, host)

    has_letter = status == "held" and channel is None
    found = [books.row(each) for each in (expired, lost)]
    assert [(row["status"], row["dead_letter_due_at"] is not None) for row in found] == [(status, has_letter)] * 2


async def test_a_lease_that_is_being_recorded_is_left_alone(outbox: Outbox, store: LeaseStore, books: Books) -> None:
    email_ids = [lease.email_id for lease in await lease_some(store, books, 2)]
    for email_id in email_ids:
        books.change(email_id, locked_until=EXPIRED)

    with books.locked(email_ids[0]):
        rescued = await outbox.recover_expired(HOLD, 5, await outbox.find_expiring())

    assert [email.email_id for email in rescued] == email_ids[1:]


@pytest.mark.parametrize(
    ("columns", "seconds"),
    [
        ({"publish_due_at": EXPIRED}, 0),
        ({"publish_due_at": LATEST - timedelta(days=1)}, 0),
        ({"status": "failed", "dead_letter_due_at": EXPIRED}, 0),
        ({"status": "failed", "dead_letter_due_at": LATEST - timedelta(days=1)}, 0),
        ({"status": "waiting", "wait_until": EXPIRED}, 0),
        ({"expires_at": EXPIRED}, 0),
        ({"status": "held", "proven_by": "ses"}, 0),
        ({"publish_due_at": "later"}, AHEAD_SECONDS / 2),
        ({"status": "waiting", "wait_until": "later"}, AHEAD_SECONDS / 2),
        ({"expires_at": "later"}, AHEAD_SECONDS / 2),
    ],
)
async def test_all_that_the_relay_has_to_do_is_next_due_at_its_time(
    outbox: Outbox, books: Books, columns: dict[str, object], seconds: float
) -> None:
    later = datetime.now(UTC) + timedelta(seconds=AHEAD_SECONDS / 2)
    for status in set(Status) - {Status.WAITING}:
        books.change(books.enqueue_one(), status=status, publish_due_at=None)
    assert await outbox.find_next_due() == math.inf
    changed = {name: later if each == "later" else each for name, each in columns.items()}
    books.change(books.enqueue_one(), **{"publish_due_at": None, **changed})

    assert seconds - 30 < max(0, await outbox.find_next_due()) <= seconds


@pytest.mark.parametrize("step", ["a scan in order", "a scan by tenant", "a wait"])
async def test_what_was_written_since_a_look_is_in_the_next_record(outbox: Outbox, books: Books, step: str) -> None:
    async def recorded_at() -> datetime:
        await outbox.follow_timeline()
        ((noted_at,),) = [row.values() for row in books.select("select noted_at from relay_timeline")]
        return cast(datetime, noted_at)

    async def is_kept() -> bool:
        return await recorded_at() == await recorded_at()

    await until_answer(is_kept)
    await outbox.find_next_due()
    enqueued_at = books.row(books.enqueue_one())["created_at"]
    match step:
        case "a scan in order":
            await outbox.find_publish_due(1)
        case "a scan by tenant":
            await outbox.find_due_tenants()
        case _:
            await outbox.wait(0.001)

    assert await recorded_at() > enqueued_at
