"""When a batch queue is idle or urgent, it hands over small batches immediately. Under load, it hands over full
batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dispatcher.host.batch_queue import BatchQueue

FULL = 8
FOR_EVER = 3600.0


class Handled:
    """Records handled batches, and runs the queue."""

    def __init__(self, linger_seconds: float) -> None:
        self.sizes: list[int] = []
        self.is_urgent = False
        self.batches: BatchQueue[int] = BatchQueue()
        self.task = asyncio.create_task(
            self.batches.run(self._handle, full=FULL, linger_seconds=linger_seconds, is_urgent=lambda: self.is_urgent)
        )

    async def _handle(self, batch: list[int]) -> None:
        self.sizes.append(len(batch))

    async def add(self, count: int) -> None:
        """Adds items, and runs the event loop until it has nothing to do."""
        for item in range(count):
            self.batches.add(item)
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def handled() -> AsyncIterator[Handled]:
    """A queue that, under load, waits for ever for a full batch."""
    made = Handled(FOR_EVER)
    yield made
    made.task.cancel()


async def test_a_single_item_is_handled_at_once_and_the_following_ones_as_a_batch(handled: Handled) -> None:
    await handled.add(1)
    await handled.add(FULL - 1)
    before = list(handled.sizes)
    await handled.add(1)

    assert before == [1]
    assert handled.sizes == [1, FULL]


async def test_a_small_urgent_batch_is_handled_at_once(handled: Handled) -> None:
    handled.is_urgent = True
    for _ in range(3):
        await handled.add(1)

    assert handled.sizes == [1, 1, 1]


async def test_after_a_quarter_full_batch_the_queue_lingers_also_if_urgent(handled: Handled) -> None:
    handled.is_urgent = True
    await handled.add(FULL // 2)
    await handled.add(FULL - 1)
    before = list(handled.sizes)
    await handled.add(1)

    assert before == [FULL // 2]
    assert handled.sizes == [FULL // 2, FULL]


async def test_the_queue_does_not_linger_if_a_full_batch_is_queued(handled: Handled) -> None:
    await handled.add(3 * FULL)

    assert handled.sizes == [3 * FULL]


async def test_the_queue_lingers_only_for_the_given_time() -> None:
    handled = Handled(linger_seconds=0.01)
    await handled.add(FULL)
    await handled.add(1)

    await asyncio.wait_for(handled.batches.finish(), 20)

    assert handled.sizes == [FULL, 1]
    handled.task.cancel()
