"""Django: the order and its receipt are committed together, or neither is.

No `transaction.on_commit` is needed, and none would do: what it calls runs after the commit, and is lost if the process
ends in between. `enqueue` writes into the transaction that is open.
"""

from __future__ import annotations

from django.db import connection, transaction

from dispatcher import Email, enqueue


def place_order(number: int, customer: str) -> None:
    """Stores an order, and has its receipt sent."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("insert into orders (number, customer) values (%s, %s)", [number, customer])
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
