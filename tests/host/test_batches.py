"""Batches form by themselves: at once where it has been quiet or somebody waits, full ones where much comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dispatcher.host.batches import Batches

FULL = 8
FOR_EVER = 3600.0


class Handled:
    """Batches that were handled, and the task that hands them over."""

    def __init__(self, linger_seconds: float) -> None:
        self.sizes: list[int] = []
        self.is_awaited = False
        self.batches: Batches[int] = Batches()
        self.task = asyncio.create_task(
            self.batches.run(self._handle, full=FULL, linger_seconds=linger_seconds, is_awaited=lambda: self.is_awaited)
        )

    async def _handle(self, batch: list[int]) -> None:
        self.sizes.append(len(batch))

    async def add(self, count: int) -> None:
        """Adds items at once, and lets everything happen that happens at once."""
        for item in range(count):
            self.batches.add(item)
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def handled() -> AsyncIterator[Handled]:
    """Batches that wait for ever where they wait."""
    made = Handled(FOR_EVER)
    yield made
    made.task.cancel()


async def test_what_comes_alone_is_handled_at_once_and_what_comes_after_it_together(handled: Handled) -> None:
    await handled.add(1)
    await handled.add(FULL - 1)
    before = list(handled.sizes)
    await handled.add(1)

    assert before == [1]
    assert handled.sizes == [1, FULL]


async def test_few_are_handled_at_once_where_somebody_waits_for_them(handled: Handled) -> None:
    handled.is_awaited = True
    for _ in range(3):
        await handled.add(1)

    assert handled.sizes == [1, 1, 1]


async def test_after_a_good_many_a_full_batch_is_waited_for_by_all(handled: Handled) -> None:
    handled.is_awaited = True
    await handled.add(FULL // 2)
    await handled.add(FULL - 1)
    before = list(handled.sizes)
    await handled.add(1)

    assert before == [FULL // 2]
    assert handled.sizes == [FULL // 2, FULL]


async def test_nothing_is_waited_for_where_a_batch_is_full_already(handled: Handled) -> None:
    await handled.add(3 * FULL)

    assert handled.sizes == [3 * FULL]


async def test_it_is_waited_for_a_moment_only() -> None:
    handled = Handled(linger_seconds=0.01)
    await handled.add(FULL)
    await handled.add(1)

    await asyncio.wait_for(handled.batches.finish(), 20)

    assert handled.sizes == [FULL, 1]
    handled.task.cancel()
