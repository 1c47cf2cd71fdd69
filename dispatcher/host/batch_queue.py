"""A queue of items that are handled in batches. Items that arrive while a batch is handled form the next batch.

For example, the stages of a worker (such as the lease stage) handle their emails in batches.

After a batch, the queue waits for a moment, so that more items join the next batch. A statement for ten emails costs
about as much as a statement for one email. In a batch of a hundred emails, each email costs half as much as in a batch
of thirty. If the queue is idle, a single item is handled immediately.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_BATCH: Final = 512
"""The most items per batch, and so the most ids per statement. Batches of more than a few hundred items are not faster,
and keep rows locked for longer."""
LINGER_SECONDS: Final = 0.015
BUSY_SHARE: Final = 4
"""If the last batch was at least a quarter (1 / BUSY_SHARE) full, items arrive fast. Then the queue waits for a full
batch, even if other work waits for the next batch (`is_urgent`)."""


class BatchQueue(Generic[T]):
    """Hands items to a handler in batches, one batch at a time, in order."""

    def __init__(self) -> None:
        self._full: int | None = None
        self._filled: asyncio.Event | None = None
        self._items: deque[T] = deque()
        self._later_count = 0
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, item: T) -> None:
        self._items.append(item)
        self._idle.clear()
        self._woken.set()
        if self._filled is not None and self._full is not None and len(self._items) >= self._full:
            self._filled.set()

    def add_later(self, item: T, seconds: float) -> None:
        """Queues an item after a delay. `finish` waits for this item, too."""
        self._later_count += 1
        self._idle.clear()
        asyncio.get_running_loop().call_later(seconds, self._add_now, item)

    def _add_now(self, item: T) -> None:
        self._later_count -= 1
        self.add(item)

    def wake(self) -> None:
        """Call this when more items may be handled: `run` then calls `room` again."""
        self._woken.set()

    def clear(self) -> None:
        self._items.clear()
        self._woken.set()

    async def run(
        self,
        handle: Callable[[list[T]], Awaitable[None]],
        *,
        room: Callable[[], int] = lambda: MAX_BATCH,
        full: int | None = None,
        linger_seconds: float = LINGER_SECONDS,
        is_urgent: Callable[[], bool] = lambda: False,
        is_any_order: Callable[[], bool] = lambda: False,
    ) -> None:
        """Passes batches to the handler, which must not raise, until cancelled.

        `room` says how many items may be handled now; call `wake` when the number grows. For a batch of `full` items,
        waits at most `linger_seconds` after the previous batch; if `is_urgent`, only while items arrive fast (see
        BUSY_SHARE). If `is_any_order`, a batch starts at a random item, for probes: emails that the provider refuses
        may arrive together.
        """
        self._full = full
        while True:
            await self._woken.wait()
            self._woken.clear()
            while batch := self._next(room(), is_any_order):
                await handle(batch)
                if full is not None and (len(batch) >= max(full // BUSY_SHARE, 2) or not is_urgent()):
                    await self._linger(full, linger_seconds)
            if not (self._items or self._later_count):
                self._idle.set()

    async def _linger(self, full: int, seconds: float) -> None:
        if len(self._items) >= full:
            return
        self._filled = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(seconds, self._filled.set)
        try:
            await self._filled.wait()
        finally:
            timer.cancel()
            self._filled = None

    async def finish(self) -> None:
        await self._idle.wait()

    def _next(self, room: int, is_any_order: Callable[[], bool]) -> list[T]:
        return take(self._items, room, is_any_order)


def take(items: deque[T], room: int, is_any_order: Callable[[], bool]) -> list[T]:
    """Removes and returns the next batch, at most `room` items, from a random item on if `is_any_order`."""
    room = min(room, MAX_BATCH)
    if 0 < room < len(items) and is_any_order():
        items.rotate(random.randrange(len(items)))  # noqa: S311
    return [items.popleft() for _ in range(min(room, len(items)))]
