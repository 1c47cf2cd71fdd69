"""Workers that ack each message at once, and note how many emails it points to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dispatcher.broker import pointer
from dispatcher.broker.consumer import Consumer, Delivery
from dispatcher.domain.lanes import NORMAL
from tests.waiting import until


class Taker:
    """A worker that acks each message at once, and notes how many emails each has."""

    def __init__(self, amqp_url: str, queue: str) -> None:
        self.sizes: list[int] = []
        self.consumer = Consumer(amqp_url, {NORMAL: queue}, prefetch=10, name="test taker")

    @property
    def emails(self) -> int:
        return sum(self.sizes)

    def take(self, delivery: Delivery) -> None:
        self.sizes.append(len(pointer.decode(delivery.body)))
        self.consumer.ack([delivery])


StartTaker = Callable[[str, str], Awaitable[Taker]]


@pytest.fixture
async def start_taker() -> AsyncIterator[StartTaker]:
    running: list[tuple[Taker, asyncio.Task[None]]] = []

    async def start(amqp_url: str, queue: str) -> Taker:
        taker = Taker(amqp_url, queue)
        running.append((taker, asyncio.create_task(taker.consumer.run(taker.take, lambda: None))))
        await until(lambda: taker.consumer.is_consuming)
        return taker

    yield start
    for taker, task in running:
        await taker.consumer.close()
        await asyncio.wait([task])
