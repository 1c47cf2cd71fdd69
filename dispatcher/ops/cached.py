"""Values that all pages of a process share for a short time, so that many viewers cost as much as one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from dispatcher.store.connections import AsyncSession

T = TypeVar("T")


class Cached(Generic[T]):
    """A value that is read from PostgreSQL and then kept for some seconds. Simultaneous calls share one read."""

    def __init__(self, read: Callable[[AsyncSession], Awaitable[T]], seconds: float) -> None:
        """
        Args:
            read: Reads the value.
            seconds: How long a value is kept.
        """
        self._read = read
        self._seconds = seconds
        self._value: T | None = None
        self._read_at = -math.inf
        self._lock = asyncio.Lock()

    async def get(self, session: Callable[[], AbstractAsyncContextManager[AsyncSession]]) -> T:
        """The kept value; reads a new value if the kept value is older than `seconds`.

        Args:
            session: Opens a session; called only if the value must be read.
        """
        async with self._lock:
            value = self._value
            if value is None or time.monotonic() - self._read_at >= self._seconds:
                async with session() as connection:
                    value = self._value = await self._read(connection)
                self._read_at = time.monotonic()
        return value

    def forget(self) -> None:
        """Makes the next `get` read a new value. Call this when this process has changed the data."""
        self._read_at = -math.inf
