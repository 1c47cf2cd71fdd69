"""SQLAlchemy with asyncio: as in sqlalchemy_orders.py. The URL begins with postgresql+psycopg://, not postgresql+asyncpg://."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from dispatcher import Email, enqueue_async

_INSERT = text("insert into orders (number, customer) values (:number, :customer)")


async def place_order(session: AsyncSession, number: int, customer: str) -> None:
    """Stores an order, and enqueues its receipt; the caller commits."""
    await session.execute(_INSERT, {"number": number, "customer": customer})
    await enqueue_async(session, _receipt(number, customer))


async def place_order_without_session(connection: AsyncConnection, number: int, customer: str) -> None:
    """Like `place_order`, but on a connection instead of a session."""
    await connection.execute(_INSERT, {"number": number, "customer": customer})
    await enqueue_async(connection, _receipt(number, customer))


def _receipt(number: int, customer: str) -> Email:
    return Email(
        message_key=f"order-{number}-receipt",
        sender="Shop <shop@example.com>",
        to=customer,
        subject=f"Your order {number}",
        text="Thank you for your order.",
    )
