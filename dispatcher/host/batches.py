"""A stage's inbox: what gathers while a batch is being handled is the next batch.

Where nobody waits for the effect of a batch, the inbox waits a moment after each: a statement costs PostgreSQL and us
about the same for one email as for ten, and in a batch of a hundred an email costs half of what it does in one of
thirty. An item that comes alone, a moment after everything else, is still handled at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MOST_AT_ONCE: Final = 512
"""Ids per statement: throughput no longer grows beyond some hundreds, and row locks are held for longer."""
LINGER_SECONDS: Final = 0.015
BUSY_SHARE: Final = 4
"""After a batch of a full one divided by this, the inbox waits for more even if somebody waits: it will not be long."""


class Batches(Generic[T]):
    """Hands items over in batches, one batch at a time, in order."""

    def __init__(self) -> None:
        self._full: int | None = None
        self._filled: asyncio.Event | None = None
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
        if self._filled is not None and self._full is not None and len(self._items) >= self._full:
            self._filled.set()

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

    def clear(self) -> None:
        """Drops everything that was not handed over."""
        self._items.clear()
        self._woken.set()

    async def run(
        self,
        handle: Callable[[list[T]], Awaitable[None]],
        *,
        room: Callable[[], int] = lambda: MOST_AT_ONCE,
        full: int | None = None,
        linger_seconds: float = LINGER_SECONDS,
        is_awaited: Callable[[], bool] = lambda: False,
        takes_any: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hands over until cancelled.

        Args:
            handle: Takes a batch; must not raise.
            room: How many items may be handed over now; call `wake` when it grows.
            full: So many are a full batch; None: the inbox never waits for one.
            linger_seconds: How long it waits for a full batch at most, after the one before.
            is_awaited: Whether somebody can only go on once a batch is handled: then the inbox does not wait.
            takes_any: Whether items may be handed over in any order: then a batch begins at a random one.
        """
        self._full = full
        while True:
            await self._woken.wait()
            self._woken.clear()
            while batch := self._next(room(), takes_any):
                await handle(batch)
                if full is not None and (len(batch) >= max(full // BUSY_SHARE, 2) or not is_awaited()):
                    await self._linger(full, linger_seconds)
            if not (self._items or self._later_count):
                self._idle.set()

    async def _linger(self, full: int, seconds: float) -> None:
        """Returns once a batch is full, or after a moment."""
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
        """Returns once everything was handed over and handled."""
        await self._idle.wait()

    def _next(self, room: int, takes_any: Callable[[], bool]) -> list[T]:
        room = min(room, MOST_AT_ONCE)
        if 0 < room < len(self._items) and takes_any():
            self._items.rotate(random.randrange(len(self._items)))  # noqa: S311
        return [self._items.popleft() for _ in range(min(room, len(self._items)))]
