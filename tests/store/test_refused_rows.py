"""A row that PostgreSQL cannot read or change does not stop the relay's work on other rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from dispatcher.domain.status import OnUncertain
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.store.books import Books
from tests.store.damage import allow_damage, damage, noise, refused

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
OTHERS = 5
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[Outbox]:
    """The relay's statements."""
    async with await connect_async(tables_url, name="relay") as session:
        yield Outbox(session)


async def test_due_emails_are_found_without_an_unreadable_row(
    outbox: Outbox, books: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    culprit, *others = books.enqueue(OTHERS + 1)
    with allow_damage(books.connection), damage(books.connection, "email_log"):
        books.change(culprit, traceparent=noise(9_000))

    for _ in range(3):
        assert [row.email_id for row in await outbox.find_publish_due(100)] == others

    assert capsys.readouterr().out.count("email.statement_failed") == 1


async def test_a_dead_letter_is_published_without_unreadable_texts(outbox: Outbox, books: Books) -> None:
    culprit, *others = books.enqueue(OTHERS + 1)
    for email_id in (culprit, *others):
        books.change(email_id, status="failed", dead_letter_due_at=LONG_AGO, last_error="no")
    with damage(books.connection, "email_log"):
        books.change(culprit, last_error=noise(9_000))

    letters = {row.email_id: row for row in await outbox.find_dead_letter_due(100)}

    assert letters.keys() == {culprit, *others}
    assert (letters[culprit].error, letters[culprit].status, letters[others[0]].error) == (None, "failed", "no")


async def test_dead_letters_beside_an_unreadable_row_keep_channel_and_trace(outbox: Outbox, books: Books) -> None:
    culprit, email_id, sms_id = books.enqueue(3)
    for each in (culprit, email_id, sms_id):
        books.change(each, status="failed", dead_letter_due_at=LONG_AGO, traceparent=TRACEPARENT)
    books.change(sms_id, channel="sms")
    with damage(books.connection, "email_log"):
        books.change(culprit, last_error=noise(9_000))

    letters = {row.email_id: row for row in await outbox.find_dead_letter_due(100)}

    assert (letters[email_id].channel, letters[email_id].traceparent) == ("email", TRACEPARENT)
    assert (letters[sms_id].channel, letters[sms_id].traceparent) == ("sms", TRACEPARENT)


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
