"""Polls a server at intervals, and keeps its last answer or error. A scrape of /metrics causes no query."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from dispatcher.errors import DispatcherError
from dispatcher.host.services import Periodic

T = TypeVar("T")

POLL_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 15.0
"""A poll without an answer after this time fails."""
LARGEST_SHARE: Final = 0.05
"""The share of time that polls may take: a slow server is polled less often. A server that is down is not slow, so the
monitor detects its recovery soon."""
LONGEST_SECONDS: Final = 60.0
"""The longest interval between two polls."""


class Poll(Generic[T]):
    """Polls one server at intervals. Of the last poll, either the answer is in `found` or the error in `fault`.
    `interval_seconds` is the time from the end of a poll to the next."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        *,
        seconds: float = POLL_SECONDS,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`ask` queries the server, and raises DispatcherError if that fails. `close` is called when the polling
        ends."""
        self._ask = ask
        self._close = close
        self._seconds = seconds
        self._answered_at: float | None = None
        self.interval_seconds = seconds
        self.found: T | None = None
        self.fault: DispatcherError | None = None

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the answer arrived; None if there is no answer."""
        return None if self._answered_at is None or self.found is None else time.monotonic() - self._answered_at

    async def run(self) -> None:
        try:
            await Periodic(self).run()
        finally:
            if self._close:
                await self._close()

    async def run_once(self) -> float | None:
        """Polls once, and sets `interval_seconds` by the duration. Returns a longer interval."""
        began_at = time.monotonic()
        await self.ask()
        seconds = time.monotonic() - began_at
        is_down = self.fault is not None and seconds < ANSWER_SECONDS
        self.interval_seconds = interval_after(0.0 if is_down else seconds, shortest=self._seconds)
        # The next multiple of a long interval can be so late that `Health` would report the server as unavailable.
        return self.interval_seconds if self.interval_seconds > self._seconds else None

    async def ask(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self.found, self.fault = await self._ask(), None
            self._answered_at = time.monotonic()
        except TimeoutError:
            self.found, self.fault = None, DispatcherError(f"No answer came within {ANSWER_SECONDS:g} s.")
        except DispatcherError as error:
            self.found, self.fault = None, error


def interval_after(answer_seconds: float, *, shortest: float) -> float:
    """The seconds to wait before the next reading: a slow server is read less often. `answer_seconds` is 0 if it is
    down."""
    return max(shortest, min(answer_seconds / LARGEST_SHARE, LONGEST_SECONDS))
