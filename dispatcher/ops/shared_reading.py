"""Reads a value once for all viewers of a page, and keeps the last value while a newer value cannot be read."""

from __future__ import annotations

import asyncio
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
    """A value that was read some time ago.

    Attributes:
        fault: Why a newer value could not be read; None if the value is fresh enough.
    """

    value: T
    age_seconds: float
    fault: str | None = None


class SharedReading(Generic[T]):
    """Reads a value for any number of callers: one read at a time, and at most one read per `fresh_seconds`.

    While a read is slow or fails, callers get the last value with its age.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[T]],
        *,
        fresh_seconds: float = FRESH_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """
        Args:
            read: Reads the value; raises DispatcherError if that fails.
            fresh_seconds: How long callers get the last value without a new read.
            patience_seconds: How long a caller waits for a new value before it gets the last value.
            answer_seconds: How long a read may take. A read that takes longer fails.
        """
        self._read = read
        self._fresh_seconds = fresh_seconds
        self._patience_seconds = patience_seconds
        self._answer_seconds = answer_seconds
        self._last: tuple[float, T] | None = None
        self._reading: asyncio.Task[T] | None = None

    async def get(self) -> Answer[T]:
        """The value with its age. Reads the value again if the last value is older than `fresh_seconds`.

        Raises:
            DispatcherError: The value could not be read, and was never read before.
        """
        if self._last is not None and (answer := self._answer()).age_seconds <= self._fresh_seconds:
            return answer
        if self._reading is None:
            self._reading = asyncio.create_task(self._run())
            self._reading.add_done_callback(self._note_end)
        reading = self._reading
        # `asyncio.wait` does not cancel the task if this caller is cancelled: the read continues for other callers.
        patience_seconds = None if self._last is None else self._patience_seconds
        await asyncio.wait([reading], timeout=patience_seconds)
        if not reading.done():
            return self._answer("PostgreSQL is slow.")
        try:
            reading.result()
        except DispatcherError as error:
            if self._last is None:
                raise
            return self._answer(error.message)
        return self._answer()

    async def _run(self) -> T:
        try:
            async with asyncio.timeout(self._answer_seconds):
                value = await self._read()
        except TimeoutError:
            raise StoreUnavailable(f"PostgreSQL did not answer within {self._answer_seconds:g} s.") from None
        self._last = (time.monotonic(), value)
        return value

    def _note_end(self, reading: asyncio.Task[T]) -> None:
        self._reading = None
        with suppress(asyncio.CancelledError):
            reading.exception()  # every caller has received the error, so asyncio must not report it again

    def _answer(self, fault: str | None = None) -> Answer[T]:
        assert self._last is not None
        read_at, value = self._last
        return Answer(value, time.monotonic() - read_at, fault)
