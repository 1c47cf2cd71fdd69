"""`Books` detects each way in which the enqueued emails, the database, the DLQ and the deliveries can disagree."""

from __future__ import annotations

from uuid import UUID

import orjson
import pika
import pytest

from dispatcher.domain.email_id import new_email_id
from tests.acceptance.books import Books, EmailRecord
from tests.acceptance.rabbit import QueueMessage

A, B = new_email_id(), new_email_id()
SENT, FAILED, HELD = (EmailRecord(status, 1, None, None) for status in ("sent", "failed", "held"))


def dead_letter(*, was_rejected: bool = False) -> QueueMessage:
    properties = pika.BasicProperties(headers={"x-death": []} if was_rejected else None)
    return QueueMessage(orjson.dumps({"email_id": str(A)}), properties)


@pytest.mark.parametrize(
    ("rows", "delivered", "dead_letters"),
    [
        pytest.param({A: SENT}, {A: 1}, [], id="sent and delivered"),
        pytest.param({A: FAILED}, {}, [dead_letter()], id="failed and announced"),
        pytest.param({A: HELD}, {}, [dead_letter()], id="held and not delivered"),
        pytest.param({A: HELD}, {A: 1}, [dead_letter()], id="held and delivered"),
        pytest.param({A: HELD}, {A: 1}, [dead_letter(), dead_letter()], id="announced twice"),
        pytest.param({A: SENT}, {A: 1}, [dead_letter(was_rejected=True)], id="garbage on the DLQ"),
        pytest.param({A: EmailRecord("pending", 0, None, None)}, {}, [], id="pending"),
    ],
)
def test_books_that_balance(
    rows: dict[UUID, EmailRecord], delivered: dict[UUID, int], dead_letters: list[QueueMessage]
) -> None:
    Books.of([A], rows, delivered, dead_letters).assert_balanced()


@pytest.mark.parametrize(
    ("rows", "delivered", "dead_letters", "complaint"),
    [
        pytest.param({}, {}, [], "lost", id="no row"),
        pytest.param({A: SENT}, {}, [], "lost", id="sent and never delivered"),
        pytest.param({A: SENT}, {A: 2}, [], "duplicates", id="delivered twice"),
        pytest.param({A: FAILED}, {A: 1}, [dead_letter()], "failed, but delivered", id="failed and delivered"),
        pytest.param({A: SENT, B: SENT}, {A: 1, B: 1}, [], "never enqueued", id="a stranger"),
        pytest.param({A: HELD}, {}, [], "without a dead letter", id="held in silence"),
        pytest.param(
            {A: SENT}, {A: 1}, [dead_letter()], "with a dead letter, but neither failed", id="announced in vain"
        ),
    ],
)
def test_books_that_do_not_balance(
    rows: dict[UUID, EmailRecord], delivered: dict[UUID, int], dead_letters: list[QueueMessage], complaint: str
) -> None:
    books = Books.of([A], rows, delivered, dead_letters)

    with pytest.raises(AssertionError, match=complaint):
        books.assert_balanced()
