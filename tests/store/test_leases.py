"""PostgreSQL leases, renews and releases emails, with its real clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outgoing import Attachment, OutgoingAttachment, file_parts
from dispatcher.domain.retry import RetryLimits
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.producers import Acceptance, enqueue_many
from dispatcher.store.connections import Pool
from dispatcher.store.leases import MAX_OCTETS, SLICE_OCTETS, LeaseStore
from tests.mime_corpus import CASES, FIELDS, RAW
from tests.store.books import Books
from tests.store.results import lease_one, result
from tests.waiting import until

EXPIRED, FAR = datetime(2026, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


def about(seconds: float) -> Any:
    """Equal to a number of seconds that PostgreSQL computed within the last half minute."""
    return pytest.approx(seconds, abs=30)


async def test_a_lease_contains_the_whole_email(store: LeaseStore, books: Books) -> None:
    lease = await lease_one(
        store,
        books,
        sender="Shöp <shop@example.com>",
        to=["Ann <ann@example.org>", "bob@example.org"],
        cc="cc@example.org",
        bcc="bcc@example.org",
        reply_to="reply@example.org",
        subject="Ünïcode 🦊 “subject”",
        text="línes\r\nand 漢字\n",
        html="<p>🦊</p>",
        headers={"X-One": "1", "X-Two": "zwei"},
        tags=["receipt", "größe"],
        correlation_id="request-1",
        on_uncertain="resend",
        erase_after_sending=True,
    )

    assert (lease.attempt_number, lease.token, lease.on_uncertain) == (1, 1, OnUncertain.RESEND)
    assert lease.correlation_id == "request-1"
    email = lease.email
    assert email is not None
    assert email.email_id == lease.email_id
    assert (email.sender, email.subject) == ("Shöp <shop@example.com>", "Ünïcode 🦊 “subject”")
    assert (email.to, email.cc) == (("Ann <ann@example.org>", "bob@example.org"), ("cc@example.org",))
    assert (email.bcc, email.reply_to) == (("bcc@example.org",), ("reply@example.org",))
    assert (email.text, email.html) == ("línes\r\nand 漢字\n", "<p>🦊</p>")
    assert dict(email.headers) == {"X-One": "1", "X-Two": "zwei"}
    assert email.tags == ("receipt", "größe"), "no provider gets the mark of what is erased after sending"
    assert lease.octets_apart == 0
    row = books.row(lease.email_id)
    assert email.created_at == row["created_at"]
    assert (row["locked_until"] - datetime.now(UTC)).total_seconds() == about(60)
    assert (row["locked_by"], row["publish_due_at"], row["published_at"] is None) == ("worker-1", None, False)


async def test_an_email_that_an_event_proves_sent_is_not_leased(store: LeaseStore, books: Books) -> None:
    proven, other = books.enqueue(2)
    books.change(proven, proven_by="ses")

    assert [lease.email_id for lease in await store.lease(books.keys([proven, other]), 60)] == [other]


@pytest.mark.parametrize("is_known", [True, False], ids=["size stored", "written by the release before"])
async def test_large_content_and_attachments_are_read_separately_from_the_lease(
    store: LeaseStore, books: Books, *, is_known: bool
) -> None:
    files = (
        Attachment("a.bin", "application/octet-stream", bytes(range(256)) * (SLICE_OCTETS // 200)),
        Attachment("b.txt", "text/plain", b""),
    )
    with_files, large, small = (
        books.enqueue_one(attachments=files, text="Ünïcode"),
        books.enqueue_one(html="ä" * MAX_OCTETS),
        books.enqueue_one(text="x" * (MAX_OCTETS // 2)),
    )
    books.enqueue_one(attachments=[Attachment("c.txt", "text/plain", b"of another email")])
    if not is_known:
        books.connection.execute("update email_content set octets = null")

    leases = {lease.email_id: lease for lease in await store.lease(books.keys([with_files, large, small]), 60)}

    assert {i for i, lease in leases.items() if lease.email is None} == {with_files, large}
    assert leases[small].octets_apart == 0
    assert leases[large].octets_apart >= 2 * MAX_OCTETS
    assert (leases[with_files].octets_apart > SLICE_OCTETS) == is_known
    assert await store.find_content_octets(with_files) == sum(len(file.content) for file in files) + len("Ünïcode") + 2
    email = await store.read_content(with_files)
    assert email is not None
    assert email.text == "Ünïcode"
    assert email.attachments == tuple(
        OutgoingAttachment(each.filename, each.content_type, each.content) for each in files
    )


async def test_messages_of_every_structure_are_read_as_they_were_enqueued(store: LeaseStore, books: Books) -> None:
    emails = [case.email() for case in CASES if case.becomes in (FIELDS, RAW)]
    answers = enqueue_many(books.connection, emails)

    for given, answer in zip(emails, answers, strict=True):
        found = await store.read_content(answer.email_id)
        assert found is not None
        names = ("sender", "to", "cc", "bcc", "reply_to", "subject", "text", "html", "headers", "raw")
        assert [getattr(found, name) for name in names] == [getattr(given, name) for name in names], given.message_key
        assert file_parts(found) == file_parts(given), given.message_key
    assert {answer.acceptance for answer in enqueue_many(books.connection, emails)} == {Acceptance.KNOWN}


async def test_a_wrong_key_or_unknown_id_is_left_out_and_the_others_are_leased(store: LeaseStore, books: Books) -> None:
    right, wrong, empty = books.enqueue(3)
    unknown, foreign = new_email_id(), uuid4()
    books.connection.execute("delete from email_content where email_id = %s", [empty])

    keys = {**books.keys([right, empty]), wrong: books.key(right), unknown: "key", foreign: "key"}
    leases = await store.lease(keys, 60)

    # An email whose content was deleted is leased without it.
    assert {lease.email_id: lease.email is not None for lease in leases} == {right: True, empty: False}
    assert books.status(wrong) == "pending"
    standing = await store.find_unleased([right, wrong, unknown, foreign])
    assert set(standing) == {right, wrong}


async def test_racing_workers_lease_no_email_twice(store: LeaseStore, other_store: LeaseStore, books: Books) -> None:
    keys = books.keys(books.enqueue(512))

    answers = await asyncio.gather(*[each.lease(keys, 60) for each in (store, other_store) for _ in range(3)])

    leased = [lease.email_id for leases in answers for lease in leases]
    assert sorted(leased) == sorted(keys)
    assert {lease.token for leases in answers for lease in leases} == {1}


async def test_a_lease_waits_for_a_locked_row_and_then_reads_its_new_state(store: LeaseStore, books: Books) -> None:
    held, free = books.enqueue(2)
    with books.locked(held) as person:
        leasing = asyncio.create_task(store.lease(books.keys([held, free]), 60))
        await until(lambda: books.waiting_for_a_lock("worker-1"))
        person.execute("update email_log set status = 'failed' where email_id = %s", [held])
        person.commit()

    assert [lease.email_id for lease in await leasing] == [free]


async def test_renew_extends_our_leases_and_leaves_out_lost_ones(store: LeaseStore, books: Books) -> None:
    keys = books.keys(books.enqueue(5))
    ours, lost, done, expired, far = await store.lease(keys, 1)
    books.change(lost.email_id, lease_token=lost.token + 1)
    await store.record([result(done, Status.SENT)])
    books.change(expired.email_id, locked_until=EXPIRED)
    books.change(far.email_id, locked_until=FAR)  # the clock was set back since
    before = {email_id: books.row(email_id) for email_id in keys}

    renewed = await store.renew({lease.email_id: lease.token for lease in (ours, lost, done, expired, far)}, 600)

    assert renewed == {ours.email_id, expired.email_id, far.email_id}
    assert books.row(far.email_id)["locked_until"] > FAR
    for email_id in renewed:
        assert books.row(email_id)["locked_until"] > before[ours.email_id]["locked_until"] + timedelta(seconds=500)
    for lease in (lost, done):
        assert books.row(lease.email_id) == before[lease.email_id]


async def test_release_returns_our_leases_with_the_attempt_and_makes_the_emails_due(
    store: LeaseStore, books: Books
) -> None:
    ours, later, lost, done = await store.lease(books.keys(books.enqueue(4)), 60)
    books.change(lost.email_id, lease_token=lost.token + 1)
    await store.record([result(done, Status.FAILED)])
    before = {lease.email_id: books.row(lease.email_id) for lease in (lost, done)}
    (now,) = books.select("select clock_timestamp() as instant")

    tokens = {lease.email_id: lease.token for lease in (ours, later, lost, done)}
    assert await store.release(tokens, {later.email_id: 60.0}) == {ours.email_id, later.email_id}

    for lease, seconds in ((ours, 0), (later, 60)):
        row = books.row(lease.email_id)
        assert (row["status"], row["attempt_count"], row["locked_by"]) == ("pending", 0, None)
        assert (row["publish_due_at"] - now["instant"]).total_seconds() == about(seconds)
    assert {lease.email_id: books.row(lease.email_id) for lease in (lost, done)} == before
    (again,) = await store.lease(books.keys([ours.email_id]), 60)
    assert (again.token, again.attempt_number) == (2, 1)


async def test_a_lease_whose_answer_was_lost_is_returned_if_it_is_still_ours(
    store: LeaseStore, other_store: LeaseStore, books: Books
) -> None:
    ours, theirs, done, untouched, unnamed = books.enqueue(5)
    (_, lease_done, _) = await store.lease(books.keys([ours, done, unnamed]), 60)
    await other_store.lease(books.keys([theirs]), 60)
    await store.record([result(lease_done, Status.SENT)])
    before = {email_id: books.row(email_id) for email_id in (theirs, done, untouched, unnamed)}

    standing = await store.find_unleased([ours, theirs, done, untouched])
    assert {i: each.our_token for i, each in standing.items() if each.our_token is not None} == {ours: 1}
    await store.release_unanswered([ours, theirs, done, untouched])

    row = books.row(ours)
    assert (row["status"], row["attempt_count"], row["locked_by"]) == ("pending", 0, None)
    assert {email_id: books.row(email_id) for email_id in before} == before
    (again,) = await store.lease(books.keys([ours]), 60)
    assert (again.token, again.attempt_number) == (2, 1)


async def test_a_lease_says_when_the_email_expires_and_an_expired_email_is_not_leased_but_settled(
    store: LeaseStore, books: Books
) -> None:
    expired, expired_too, alive, alive_too = books.enqueue(4, expires_at=datetime.now(UTC) + timedelta(hours=1))
    for email_id in (expired, expired_too):
        books.change(email_id, expires_at=EXPIRED)

    (lease,) = await store.lease(books.keys([expired, alive]), 60)
    unread = await store.lease_without_content(alive_too, books.key(alive_too), 60)

    assert (lease.email_id, lease.expires_in) == (alive, about(3600))
    assert unread is not None
    assert unread.expires_in == about(3600)
    assert await store.lease_without_content(expired_too, books.key(expired_too), 60) is None
    found = await store.find_unleased([expired, alive])
    assert {email_id: each.is_left_out for email_id, each in found.items()} == {expired: True, alive: False}
    assert (await lease_one(store, books)).expires_in is None


async def test_a_scheduled_email_counts_from_its_schedule(store: LeaseStore, books: Books) -> None:
    send_at = datetime.now(UTC) + timedelta(days=3)
    email_id = books.enqueue_one(send_at=send_at)
    assert await store.lease(books.keys([email_id]), 60) == [], "a waiting email is not leased"
    books.change(email_id, status="pending", wait_until=None)

    (lease,) = await store.lease(books.keys([email_id]), 60)

    assert lease.due_since == send_at
    assert lease.email is not None
    assert lease.email.created_at == send_at, "the Date header is not days before the arrival"
    content = await store.read_content(email_id)
    assert content is not None
    assert content.created_at == send_at


async def date_of(store: LeaseStore, books: Books, email_id: UUID) -> datetime:
    """Leases the email, asserts that both statements give one Date, and releases the email."""
    (lease,) = await store.lease(books.keys([email_id]), 60)
    content = await store.read_content(email_id)
    assert lease.email is not None
    assert content is not None
    assert content.created_at == lease.email.created_at
    books.change(email_id, status="pending", locked_by=None, locked_until=EXPIRED)
    return lease.email.created_at


HOUR, DAYS = timedelta(hours=1), timedelta(days=1)


@pytest.mark.parametrize(
    ("due", "leased", "is_uncertain", "keeps_date"),
    [
        pytest.param(HOUR, None, False, True, id="due for an hour"),
        pytest.param(8 * DAYS, None, False, False, id="due for days: the date of the sending"),
        pytest.param(5 * HOUR, 5 * HOUR, False, False, id="after an attempt that surely failed: of the next sending"),
        pytest.param(0 * HOUR, 3 * DAYS, True, True, id="a replay after an uncertain attempt: its own"),
    ],
)
async def test_the_date_is_that_of_the_sending_if_the_email_could_be_sent_hours_before(
    store: LeaseStore, books: Books, due: timedelta, leased: timedelta | None, is_uncertain: bool, keeps_date: bool
) -> None:
    email_id = books.enqueue_one()
    now = datetime.now(UTC)
    books.change(email_id, due_since=now - due, leased_at=leased and now - leased, was_uncertain=is_uncertain)

    date = await date_of(store, books, email_id)

    assert date == now - due if keeps_date else date >= now - timedelta(seconds=1)
    assert books.row(email_id)["leased_at"] >= now - timedelta(seconds=1)
    assert books.row(email_id)["due_since"] == now - due, "the measured delay includes the pause"


@pytest.mark.parametrize("age", [HOUR, 8 * DAYS], ids=["an hour", "eight days"])
async def test_after_an_uncertain_attempt_the_date_is_the_same_days_later(
    store: LeaseStore, books: Books, age: timedelta
) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, due_since=datetime.now(UTC) - age)
    first = await date_of(store, books, email_id)
    books.change(email_id, was_uncertain=True)
    # Three days pass: the row is three days older.
    row, days = books.row(email_id), 3 * DAYS
    books.change(email_id, due_since=row["due_since"] - days, leased_at=row["leased_at"] - days)

    assert [await date_of(store, books, email_id) for _ in range(3)] == [first - days] * 3


async def test_a_lease_has_the_limits_of_its_row_or_else_of_the_host(pool: Pool, books: Books) -> None:
    def store(redeliver_seconds: float) -> LeaseStore:
        return LeaseStore(pool, worker="worker-1", slot="slot", redeliver_seconds=redeliver_seconds)

    plain, own, attempts, expiring, replayed = books.enqueue(5)
    now = datetime.now(UTC)
    books.change(own, redeliver_seconds=1000, redelivery_count=2)
    books.change(attempts, max_attempts=2, redeliver_seconds=0)
    books.change(expiring, expires_at=now + timedelta(seconds=200))
    books.change(replayed, created_at=now - timedelta(days=1), due_since=now - timedelta(seconds=60))
    off = {lease.email_id: lease for lease in await store(0).lease(books.keys([plain, own, attempts]), 60)}
    await store(0).release({lease.email_id: lease.token for lease in off.values()})
    on = {
        lease.email_id: lease.limits
        for lease in await store(600).lease(books.keys([plain, own, attempts, expiring, replayed]), 60)
    }

    assert off[plain].limits is None
    assert off[own].limits == RetryLimits(None, about(1000), 2)
    assert on == {
        plain: RetryLimits(None, about(600), 0),
        own: RetryLimits(None, about(1000), 2),
        attempts: RetryLimits(2, about(0), 0),
        expiring: RetryLimits(None, about(200), 0),
        replayed: RetryLimits(None, about(540), 0),
    }
    await store(600).release(dict.fromkeys(on, 2) | dict.fromkeys((expiring, replayed), 1))
    key = books.key(own)
    alone = await store(600).lease_without_content(own, key, 60)
    assert alone is not None
    assert alone.limits == RetryLimits(None, about(1000), 2)
