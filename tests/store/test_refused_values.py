"""The schema refuses values that Python or AMQP cannot represent."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from dispatcher.store.connections import connect_async
from dispatcher.store.instants import EARLIEST, LATEST
from dispatcher.store.outbox import Outbox
from tests.store.books import Books
from tests.store.damage import allow_damage
from tests.store.damaged_rows import INSTANTS, READ, REFUSED, Columns


def insert(books: Books, columns: Columns) -> None:
    row = {"email_id": uuid4(), "tenant_id": "acme", "message_key": "key", **columns}
    statement = sql.SQL("insert into email_log ({}) values ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, row)), sql.SQL(", ").join([sql.Placeholder()] * len(row))
    )
    books.connection.execute(statement, [*row.values()])


@pytest.mark.parametrize("refused", REFUSED)
def test_a_value_that_nothing_can_represent_is_not_inserted(books: Books, refused: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        insert(books, REFUSED[refused])

    assert books.rows() == []


def test_values_that_every_reader_tolerates_are_inserted(books: Books) -> None:
    with books.connection.transaction(force_rollback=True):
        for columns in READ.values():
            insert(books, columns)


@pytest.mark.parametrize(
    "columns",
    [
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        {"on_uncertain": "hold"},
        {"status": "waiting", "wait_until": "9999-12-31 23:59:59+00"},
        {"locked_until": "1970-01-01 00:00+00"},
    ],
    ids=repr,
)
def test_every_value_of_enqueue_is_inserted(books: Books, columns: Columns) -> None:
    insert(books, columns)

    assert len(books.rows()) == 1


def test_a_damaged_row_of_before_can_be_changed(books: Books) -> None:
    culprit = books.enqueue_one()
    with allow_damage(books.connection):
        books.change(culprit, due_since="-infinity", traceparent="0" * 200_000, on_uncertain="maybe")

    books.change(culprit, status="cancelled", publish_due_at=None)

    assert books.statuses() == {"cancelled": 1}


@pytest.mark.parametrize(("instant", "nearest"), [*zip(INSTANTS, [EARLIEST, LATEST, EARLIEST, LATEST], strict=True)])
async def test_an_instant_that_python_cannot_represent_is_read_as_the_nearest(
    books: Books, tables_url: str, instant: str, nearest: datetime
) -> None:
    other, culprit = books.enqueue(2)
    books.change(other, publish_due_at=datetime(2026, 1, 1, tzinfo=UTC))
    books.change(culprit, publish_due_at=instant)

    async with await connect_async(tables_url, name="relay") as session:
        found = {row.email_id: row.due_at for row in await Outbox(session).find_publish_due(10)}

    assert found == {culprit: nearest, other: datetime(2026, 1, 1, tzinfo=UTC)}


@pytest.mark.parametrize("instant", ["-infinity", "infinity"])
async def test_an_infinite_due_mark_is_cleared(books: Books, tables_url: str, instant: str) -> None:
    culprit = books.enqueue_one()
    books.change(culprit, publish_due_at=instant)

    async with await connect_async(tables_url, name="relay") as session:
        outbox = Outbox(session)
        due = {row.email_id: row.due_at for row in await outbox.find_publish_due(10)}
        assert await outbox.mark_published(due) == set()

    assert books.row(culprit)["publish_due_at"] is None
