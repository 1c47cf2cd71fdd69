"""SQLAlchemy: the order and its receipt are committed together, or neither is. The URL begins with postgresql+psycopg://."""

from __future__ import annotations

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from dispatcher import Email, enqueue

_INSERT = text("insert into orders (number, customer) values (:number, :customer)")


def place_order(session: Session, number: int, customer: str) -> None:
    """Stores an order, and enqueues its receipt; the caller commits."""
    session.execute(_INSERT, {"number": number, "customer": customer})
    enqueue(session, _receipt(number, customer))


def place_order_without_session(connection: Connection, number: int, customer: str) -> None:
    """Like `place_order`, but on a connection instead of a session."""
    connection.execute(_INSERT, {"number": number, "customer": customer})
    enqueue(connection, _receipt(number, customer))


def _receipt(number: int, customer: str) -> Email:
    return Email(
        message_key=f"order-{number}-receipt",
        sender="Shop <shop@example.com>",
        to=customer,
        subject=f"Your order {number}",
        text="Thank you for your order.",
    )
