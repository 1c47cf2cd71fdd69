"""A row that PostgreSQL cannot read or change does not stop the relay's work on other rows. The schema refuses values
that Python or AMQP cannot represent."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest

from dispatcher.domain.status import OnUncertain
from dispatcher.store.instants import EARLIEST, LATEST
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.store.books import Books
from tests.store.damage import allow_damage, damage, noise, refused
from tests.store.damaged_rows import INSTANTS, READ, REFUSED, Columns, insert_row

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
OTHERS = 5
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_due_emails_are_found_without_an_unreadable_row(
    outbox: Outbox, books: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    culprit, *others = books.enqueue(OTHERS + 1)
    with allow_damage(books.connection), damage(books.connection, "email_log"):
        books.change(culprit, traceparent=noise(9_000))

    for _ in range(3):
        assert [row.email_id for row in await outbox.find_publish_due(100)] == others

    assert capsys.readouterr().out.count("email.statement_failed") == 1


async def test_a_dead_letter_is_published_without_unreadable_texts_and_the_others_are_complete(
    outbox: Outbox, books: Books
) -> None:
    culprit, email_id, sms_id = books.enqueue(3)
    for each in (culprit, email_id, sms_id):
        dead = {"status": "failed", "dead_letter_due_at": LONG_AGO, "last_error": "no", "traceparent": TRACEPARENT}
        books.change(each, **dead)
    books.change(sms_id, channel="sms")
    with damage(books.connection, "email_log"):
        books.change(culprit, last_error=noise(9_000))

    letters = {row.email_id: row for row in await outbox.find_dead_letter_due(100)}

    assert letters.keys() == {culprit, email_id, sms_id}
    assert (letters[culprit].error, letters[culprit].status) == (None, "failed")
    for each, channel in ((email_id, "email"), (sms_id, "sms")):
        found = letters[each]
        assert (found.error, found.channel, found.traceparent) == ("no", channel, TRACEPARENT)


async def test_due_marks_are_cleared_except_on_an_unchangeable_row(outbox: Outbox, books: Books) -> None:
    culprit, *_ = books.enqueue(OTHERS + 1)
    due = {row.email_id: row.due_at for row in await outbox.find_publish_due(100)}

    with refused(books.connection, culprit, "new.publish_due_at is null"):
        assert await outbox.mark_published(due) == {culprit}

    assert [row.email_id for row in await outbox.find_publish_due(100)] == [culprit]


async def test_expired_leases_are_recovered_except_on_an_unchangeable_row(
    outbox: Outbox, store: LeaseStore, books: Books
) -> None:
    culprit, *others = books.enqueue(OTHERS + 1)
    await store.lease(books.keys([culprit, *others]), 60)
    for email_id in (culprit, *others):
        books.change(email_id, locked_until=LONG_AGO)

    with refused(books.connection, culprit, "new.status = 'held'"):
        rescued = await outbox.recover_expired(OnUncertain.HOLD, 5, await outbox.find_expiring())

    assert {each.email_id for each in rescued} == set(others)
    assert books.statuses() == {"held": OTHERS, "sending": 1}


async def test_lost_messages_are_due_again_except_on_an_unchangeable_row(outbox: Outbox, books: Books) -> None:
    culprit, *others = books.enqueue(OTHERS + 1)
    for email_id in (culprit, *others):
        books.change(email_id, publish_due_at=None, published_at=LONG_AGO)

    with refused(books.connection, culprit, "new.publish_due_at is not null"):
        assert await outbox.republish_lost(["normal"], 1, 100, OnUncertain.HOLD, 5) == (OTHERS, [])

    assert {row.email_id for row in await outbox.find_publish_due(100)} == set(others)


def insert(books: Books, columns: Columns) -> None:
    insert_row(books.connection, {"email_id": uuid4(), "tenant_id": "acme", "message_key": "key", **columns})


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_nothing_can_represent_is_not_inserted(books: Books, name: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        insert(books, REFUSED[name])

    assert books.rows() == []


def test_values_of_enqueue_and_values_that_every_reader_tolerates_are_inserted(books: Books) -> None:
    usual: list[Columns] = [
        {"traceparent": TRACEPARENT},
        {"on_uncertain": "hold"},
        {"status": "waiting", "wait_until": "9999-12-31 23:59:59+00"},
        {"locked_until": "1970-01-01 00:00+00"},
    ]
    with books.connection.transaction(force_rollback=True):
        for columns in (*usual, *READ.values()):
            insert(books, columns)


def test_a_damaged_row_of_before_can_be_changed(books: Books) -> None:
    culprit = books.enqueue_one()
    with allow_damage(books.connection):
        books.change(culprit, due_since="-infinity", traceparent="0" * 200_000, on_uncertain="maybe")

    books.change(culprit, status="cancelled", publish_due_at=None)

    assert books.statuses() == {"cancelled": 1}


async def test_an_instant_that_python_cannot_represent_is_read_as_the_nearest_and_an_infinite_one_is_cleared(
    outbox: Outbox, books: Books
) -> None:
    other, *culprits = books.enqueue(1 + len(INSTANTS))
    books.change(other, publish_due_at=LONG_AGO)
    for culprit, instant in zip(culprits, INSTANTS, strict=True):
        books.change(culprit, publish_due_at=instant)

    found = {row.email_id: row.due_at for row in await outbox.find_publish_due(10)}

    assert found == {**dict(zip(culprits, [EARLIEST, LATEST] * 2, strict=True)), other: LONG_AGO}
    infinite = {email_id: found[email_id] for email_id in culprits[:2]}
    assert await outbox.mark_published(infinite) == set()
    assert [books.row(email_id)["publish_due_at"] for email_id in infinite] == [None, None]
