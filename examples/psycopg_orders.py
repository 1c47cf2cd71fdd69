"""psycopg: the order and its receipt are committed together, or neither is. For asyncio, see fastapi_orders.py."""

from __future__ import annotations

from typing import Any

import psycopg

from dispatcher import Email, enqueue


def place_order(connection: psycopg.Connection[Any], number: int, customer: str) -> None:
    """Stores an order, and enqueues its receipt."""
    with connection.transaction():
        connection.execute("insert into orders (number, customer) values (%s, %s)", [number, customer])
        enqueue(
            connection,
            Email(
                message_key=f"order-{number}-receipt",
                sender="Shop <shop@example.com>",
                to=customer,
                subject=f"Your order {number}",
                text="Thank you for your order.",
            ),
        )
