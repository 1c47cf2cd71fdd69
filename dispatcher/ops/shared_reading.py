"""Reads a value once for all viewers of a page, so that many viewers cost as much as one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from dispatcher.errors import DispatcherError, StoreUnavailable

T = TypeVar("T")

FRESH_SECONDS: Final = 2.0
"""While the last answer is not older than this, viewers get it without a new read. A page asks again every five
seconds."""
PATIENCE_SECONDS: Final = 1.0
"""How long a viewer waits for a new answer before it gets the last answer."""
ANSWER_SECONDS: Final = 8.0
"""A read without an answer after this time fails."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """A value that was read some time ago. `fault` says why a newer value could not be read; None if it is fresh."""

    value: T
    age_seconds: float
    fault: str | None = None


class SharedReading(Generic[T]):
    """Reads a value for any number of callers: one read at a time, and at most one read per `fresh_seconds`. `read`
    raises DispatcherError if it fails."""

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        *,
        fresh_seconds: float = FRESH_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._read = read
        self._fresh_seconds = fresh_seconds
        self._patience_seconds = patience_seconds
        self._last: tuple[float, T] | None = None
        self._fresh_until = -math.inf
        self._reading: asyncio.Task[T] | None = None

    async def fresh(self) -> T:
        """A value that is at most `fresh_seconds` old. Raises DispatcherError if it cannot be read."""
        if self._last is not None and time.monotonic() <= self._fresh_until:
            return self._last[1]
        if self._reading is None:
            self._reading = asyncio.create_task(self._run())
            self._reading.add_done_callback(self._note_end)
        return await asyncio.shield(self._reading)  # if this caller is cancelled, the read continues for other callers

    async def get(self) -> Answer[T]:
        """The value with its age: the last one, and the reason, while a newer value cannot be read within
        `patience_seconds`. Raises DispatcherError if the value was never read."""
        fault = None
        try:
            async with asyncio.timeout(None if self._last is None else self._patience_seconds):
                await self.fresh()
        except TimeoutError:
            fault = "PostgreSQL is slow."
        except DispatcherError as error:
            if self._last is None:
                raise
            fault = error.message
        assert self._last is not None
        read_at, value = self._last
        return Answer(value, time.monotonic() - read_at, fault)

    def forget(self) -> None:
        """Makes the next caller read a new value. Call this when this process has changed the data."""
        self._fresh_until = -math.inf

    async def _run(self) -> T:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                value = await self._read()
        except TimeoutError:
            raise StoreUnavailable(f"PostgreSQL did not answer within {ANSWER_SECONDS:g} s.") from None
        self._last = (time.monotonic(), value)
        self._fresh_until = self._last[0] + self._fresh_seconds
        return value

    def _note_end(self, reading: asyncio.Task[T]) -> None:
        self._reading = None
        with suppress(asyncio.CancelledError):
            reading.exception()  # every caller has received the error, so asyncio must not report it again
