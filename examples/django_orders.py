"""Django: the order and its receipt are committed together, or neither is.

    EMAIL_BACKEND = "dispatcher.contrib.django.EmailBackend"

The backend enqueues in the open transaction. Do not send in `transaction.on_commit`: a callback runs after the commit,
and is lost if the process ends in between. `dispatcher.enqueue` takes Django's `connection`, too.
"""

from __future__ import annotations

from django.core.mail import EmailMessage
from django.db import connection, transaction


def place_order(number: int, customer: str) -> None:
    """Stores an order, and enqueues its receipt."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("insert into orders (number, customer) values (%s, %s)", [number, customer])
        EmailMessage(
            subject=f"Your order {number}",
            body="Thank you for your order.",
            from_email="Shop <shop@example.com>",
            to=[customer],
            headers={"Idempotency-Key": f"order-{number}-receipt"},
        ).send()
