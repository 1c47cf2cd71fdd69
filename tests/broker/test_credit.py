"""How many emails a publisher may publish to a queue that must stay shallow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dispatcher.broker.credit import EMPTY_EMAILS, LEAST_SHARE, QueueCredit


class EmptyQueue:
    """A queue whose messages are always taken at once.

    Attributes:
        counts: How often its messages were counted.
    """

    def __init__(self) -> None:
        self.counts = 0

    async def count_ready(self) -> int:
        self.counts += 1
        return 0


@asynccontextmanager
async def counted_credit(queue: EmptyQueue) -> AsyncIterator[QueueCredit]:
    """A credit that knows the result of its first count."""
    credit = QueueCredit(queue.count_ready)
    assert credit.emails == 0
    await credit.counted()
    try:
        yield credit
    finally:
        await credit.close()


async def test_a_small_rest_of_the_credit_is_not_published() -> None:
    async with counted_credit(EmptyQueue()) as credit:
        assert credit.emails == EMPTY_EMAILS
        credit.take(EMPTY_EMAILS - EMPTY_EMAILS // LEAST_SHARE)
        assert credit.emails == 0


async def test_used_credit_is_counted_again_without_another_look() -> None:
    queue = EmptyQueue()
    async with counted_credit(queue) as credit:
        credit.take(EMPTY_EMAILS)
        assert credit.emails == 0
        await credit.counted()

        assert queue.counts == 2
        assert credit.emails >= EMPTY_EMAILS
