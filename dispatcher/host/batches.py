"""Batches that form by themselves: what gathers while a batch is being handled is the next one.

Where nobody waits for what a batch brings, a moment is waited for more after each: a statement costs PostgreSQL and us
about the same for one email as for ten, and in one of a hundred an email costs half of what it does in one of thirty.
What comes alone, a moment after everything else, is still handled at once.
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
"""After a batch of a full one divided by this, more is waited for even by who is awaited: it will not be long."""


class Batches(Generic[T]):
    """Hands items over in batches, one batch at a time, in order."""

    def __init__(
        self,
        handle: Callable[[list[T]], Awaitable[None]],
        room: Callable[[], int] | None = None,
        *,
        full: int | None = None,
        linger_seconds: float = LINGER_SECONDS,
        is_awaited: Callable[[], bool] = lambda: False,
        takes_any: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            handle: Takes a batch; must not raise.
            room: How many items may be handed over now; call `wake` when it grows. None: no bound but `MOST_AT_ONCE`.
            full: So many are a full batch; None: none is waited for.
            linger_seconds: How long a full batch is waited for at most, after the one before.
            is_awaited: Whether somebody can only go on once a batch is handled: then nothing is waited for.
            takes_any: Whether items may be handed over in any order: then a batch begins at a random one.
        """
        self._handle = handle
        self._room = room
        self._full = full
        self._linger_seconds = linger_seconds
        self._is_awaited = is_awaited
        self._takes_any = takes_any
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
                if self._full is not None and self._may_linger(len(batch), self._full):
                    await self._linger(self._full)
            if not (self._items or self._later_count):
                self._idle.set()

    def _may_linger(self, handled: int, full: int) -> bool:
        return handled >= max(full // BUSY_SHARE, 2) or not self._is_awaited()

    async def _linger(self, full: int) -> None:
        """Returns once a batch is full, or after a moment."""
        if len(self._items) >= full:
            return
        self._filled = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(self._linger_seconds, self._filled.set)
        try:
            await self._filled.wait()
        finally:
            timer.cancel()
            self._filled = None

    async def finish(self) -> None:
        """Returns once everything was handed over and handled."""
        await self._idle.wait()

    def _next(self) -> list[T]:
        room = MOST_AT_ONCE if self._room is None else min(self._room(), MOST_AT_ONCE)
        if 0 < room < len(self._items) and self._takes_any():
            self._items.rotate(random.randrange(len(self._items)))  # noqa: S311
        return [self._items.popleft() for _ in range(min(room, len(self._items)))]
