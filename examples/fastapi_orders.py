"""FastAPI: the order and its receipt are committed together, or neither is.

DATABASE_URL=postgresql://… uvicorn examples.fastapi_orders:app
"""

from __future__ import annotations

import os

import psycopg
from fastapi import FastAPI
from pydantic import BaseModel

from dispatcher import Email, enqueue_async

app = FastAPI()


class Order(BaseModel):
    """The request of a customer."""

    number: int
    customer: str


@app.post("/orders", status_code=201)
async def place_order(order: Order) -> dict[str, str]:
    """Stores an order, and enqueues its receipt."""
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"]) as connection:
        await connection.execute(
            "insert into orders (number, customer) values (%s, %s)", [order.number, order.customer]
        )
        receipt = await enqueue_async(
            connection,
            Email(
                message_key=f"order-{order.number}-receipt",
                sender="Shop <shop@example.com>",
                to=order.customer,
                subject=f"Your order {order.number}",
                text="Thank you for your order.",
            ),
        )
    return {"receipt": str(receipt.email_id)}
