"""Batches that form by themselves: what gathers while a batch is being handled is the next one.

Under light load an item is handled at once; under heavy load batches grow to what the statement before let gather. No
linger to tune.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MOST_AT_ONCE: Final = 512
"""Ids per statement: throughput no longer grows beyond some hundreds, and row locks are held for longer."""


class Batches(Generic[T]):
    """Hands items over in batches, one batch at a time, in order."""

    def __init__(self, handle: Callable[[list[T]], Awaitable[None]], room: Callable[[], int] | None = None) -> None:
        """
        Args:
            handle: Takes a batch; must not raise.
            room: How many items may be handed over now; call `wake` when it grows. None: no bound but `MOST_AT_ONCE`.
        """
        self._handle = handle
        self._room = room
        self._items: deque[T] = deque()
        self._later_count = 0
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, item: T) -> None:
        """Queues an item."""
        self._items.append(item)
        self._idle.clear()
        self._woken.set()

    def add_later(self, item: T, seconds: float) -> None:
        """Queues an item when that time is over; `finish` waits for it."""
        self._later_count += 1
        self._idle.clear()
        asyncio.get_running_loop().call_later(seconds, self._add_now, item)

    def _add_now(self, item: T) -> None:
        self._later_count -= 1
        self.add(item)

    def wake(self) -> None:
        """Looks again whether there is room."""
        self._woken.set()

    def take_all(self) -> list[T]:
        """Takes back everything that was not handed over."""
        items = list(self._items)
        self._items.clear()
        self._woken.set()
        return items

    async def run(self) -> None:
        """Hands over until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while batch := self._next():
                await self._handle(batch)
            if not (self._items or self._later_count):
                self._idle.set()

    async def finish(self) -> None:
        """Returns once everything was handed over and handled."""
        await self._idle.wait()

    def _next(self) -> list[T]:
        room = MOST_AT_ONCE if self._room is None else min(self._room(), MOST_AT_ONCE)
        return [self._items.popleft() for _ in range(min(room, len(self._items)))]
