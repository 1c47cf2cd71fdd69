"""When a batch queue is idle or urgent, it hands over small batches immediately. Under load, it hands over full
batches."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.host.batch_queue import BatchQueue

FULL = 8
FOR_EVER = 3600.0


class Handled:
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


@pytest.mark.parametrize(
    ("is_urgent", "counts", "sizes"),
    [
        pytest.param(False, [1, FULL - 1], [1], id="a single item is handled at once, and the following ones wait"),
        pytest.param(False, [1, FULL - 1, 1], [1, FULL], id="the following ones are handled as a full batch"),
        pytest.param(True, [1, 1, 1], [1, 1, 1], id="a small urgent batch is handled at once"),
        pytest.param(True, [FULL // 2, FULL - 1], [FULL // 2], id="after a quarter-full batch also urgent ones wait"),
        pytest.param(True, [FULL // 2, FULL - 1, 1], [FULL // 2, FULL], id="urgent ones wait for a full batch"),
        pytest.param(False, [3 * FULL], [3 * FULL], id="the queue does not wait if a full batch is queued"),
    ],
)
async def test_what_is_handled_at_once_if_a_full_batch_never_comes(
    is_urgent: bool, counts: list[int], sizes: list[int]
) -> None:
    handled = Handled(FOR_EVER)
    handled.is_urgent = is_urgent
    for count in counts:
        await handled.add(count)

    assert handled.sizes == sizes
    handled.task.cancel()


async def test_the_queue_lingers_only_for_the_given_time() -> None:
    handled = Handled(linger_seconds=0.01)
    await handled.add(FULL)
    await handled.add(1)

    await asyncio.wait_for(handled.batches.finish(), 20)

    assert handled.sizes == [FULL, 1]
    handled.task.cancel()
