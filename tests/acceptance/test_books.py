"""The oracle is tested, too: each way in which the books can fail to balance is seen."""

from __future__ import annotations

from uuid import UUID

import orjson
import pika
import pytest

from dispatcher.domain.email_id import new_email_id
from tests.acceptance.books import Books, Row
from tests.acceptance.rabbit import Message

A, B = new_email_id(), new_email_id()
SENT, FAILED, HELD = (Row(status, 1, None, None) for status in ("sent", "failed", "held"))


def letter(*, was_rejected: bool = False) -> Message:
    properties = pika.BasicProperties(headers={"x-death": []} if was_rejected else None)
    return Message(orjson.dumps({"email_id": str(A)}), properties)


@pytest.mark.parametrize(
    ("rows", "delivered", "letters"),
    [
        pytest.param({A: SENT}, {A: 1}, [], id="sent and delivered"),
        pytest.param({A: FAILED}, {}, [letter()], id="failed and announced"),
        pytest.param({A: HELD}, {}, [letter()], id="held and not delivered"),
        pytest.param({A: HELD}, {A: 1}, [letter()], id="held and delivered"),
        pytest.param({A: HELD}, {A: 1}, [letter(), letter()], id="announced twice"),
        pytest.param({A: SENT}, {A: 1}, [letter(was_rejected=True)], id="garbage on the DLQ"),
        pytest.param({A: Row("pending", 0, None, None)}, {}, [], id="pending"),
    ],
)
def test_books_that_balance(rows: dict[UUID, Row], delivered: dict[UUID, int], letters: list[Message]) -> None:
    Books.of([A], rows, delivered, letters).assert_balanced()


@pytest.mark.parametrize(
    ("rows", "delivered", "letters", "complaint"),
    [
        pytest.param({}, {}, [], "lost", id="no row"),
        pytest.param({A: SENT}, {}, [], "lost", id="sent and never delivered"),
        pytest.param({A: SENT}, {A: 2}, [], "duplicates", id="delivered twice"),
        pytest.param({A: FAILED}, {A: 1}, [letter()], "failed, yet delivered", id="failed and delivered"),
        pytest.param({A: SENT, B: SENT}, {A: 1, B: 1}, [], "never enqueued", id="a stranger"),
        pytest.param({A: HELD}, {}, [], "without a dead letter", id="held in silence"),
        pytest.param({A: SENT}, {A: 1}, [letter()], "with a dead letter, but alive", id="announced in vain"),
    ],
)
def test_books_that_do_not(
    rows: dict[UUID, Row], delivered: dict[UUID, int], letters: list[Message], complaint: str
) -> None:
    books = Books.of([A], rows, delivered, letters)

    with pytest.raises(AssertionError, match=complaint):
        books.assert_balanced()
