"""SQLAlchemy: the order and its receipt are committed together, or neither is. The engine's driver must be psycopg."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.orm import Session

from dispatcher import Email, enqueue


def place_order(session: Session, number: int, customer: str) -> None:
    """Stores an order, and has its receipt sent; the caller commits."""
    session.execute(
        text("insert into orders (number, customer) values (:number, :customer)"),
        {"number": number, "customer": customer},
    )
    # The psycopg connection of the session's transaction.
    driver_connection = session.connection().connection.driver_connection
    assert driver_connection is not None
    enqueue(
        driver_connection,
        Email(
            message_key=f"order-{number}-receipt",
            sender="Shop <shop@example.com>",
            to=customer,
            subject=f"Your order {number}",
            text="Thank you for your order.",
        ),
    )
