"""What the monitor knows of a server: its last answer, or why there is none. Asked at intervals, not per scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from dispatcher.errors import DispatcherError
from dispatcher.host.services import Periodic

T = TypeVar("T")

LOOK_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 15.0
"""A server that takes longer than this has not answered."""
LARGEST_SHARE: Final = 0.05
"""Of the time that a question may be under way: what is slow to answer is asked less often."""
LONGEST_SECONDS: Final = 60.0
"""Between two questions, however slow the answer: nobody should learn late that a server is well again."""


class Poll(Generic[T]):
    """Asks one question again and again.

    Attributes:
        found: The last answer; None while there is none.
        fault: Why there is none; None where nobody has asked yet, too.
        interval_seconds: From the last answer to the next question.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        *,
        seconds: float = LOOK_SECONDS,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            ask: Raises DispatcherError where there is no answer.
            seconds: Between two questions.
            close: Called when nobody asks any more.
        """
        self._ask = ask
        self._close = close
        self._seconds = seconds
        self._answered_at: float | None = None
        self.interval_seconds = seconds
        self.found: T | None = None
        self.fault: DispatcherError | None = None

    @property
    def age_seconds(self) -> float | None:
        """How old the answer is; None if there is none."""
        return None if self._answered_at is None or self.found is None else time.monotonic() - self._answered_at

    async def run(self) -> None:
        """Asks until cancelled."""
        try:
            await Periodic(self).run()
        finally:
            if self._close:
                await self._close()

    async def run_once(self) -> None:
        """Asks once, and says when to ask again."""
        began_at = time.monotonic()
        await self.ask()
        self.interval_seconds = interval_after(time.monotonic() - began_at, shortest=self._seconds)

    async def ask(self) -> None:
        """Asks once."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                self.found, self.fault = await self._ask(), None
            self._answered_at = time.monotonic()
        except TimeoutError:
            self.found, self.fault = None, DispatcherError(f"No answer came within {ANSWER_SECONDS:g} s.")
        except DispatcherError as error:
            self.found, self.fault = None, error


def interval_after(answer_seconds: float, *, shortest: float) -> float:
    """How long to wait after an answer, or none, that took so long; in seconds."""
    return max(shortest, min(answer_seconds / LARGEST_SHARE, LONGEST_SECONDS))
