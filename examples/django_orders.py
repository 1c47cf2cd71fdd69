"""Django: the order and its receipt are committed together, or neither is.

`enqueue` writes into the open transaction. Do not call it in `transaction.on_commit`: a callback runs after the commit,
and is lost if the process ends in between.
"""

from __future__ import annotations

from django.db import connection, transaction

from dispatcher import Email, enqueue


def place_order(number: int, customer: str) -> None:
    """Stores an order, and enqueues its receipt."""
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
