"""Functions that wait for a condition, with a deadline and never for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

DEADLINE_SECONDS: Final = 20.0
"""Far longer than any condition takes to come true. Only a failing test waits this long."""
_LOOK_SECONDS: Final = 0.005
_TICK_SECONDS: Final = 0.05


def wait_until(condition: Callable[[], T], seconds: float = DEADLINE_SECONDS) -> T:
    """Wait until the condition is true, and return its value. Fails after the deadline."""
    give_up_at = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up_at, f"timed out after {seconds:g} s"
        time.sleep(_LOOK_SECONDS)
    return value


async def until_answer(ask: Callable[[], Awaitable[T]], suits: Callable[[T], object] = bool) -> T:
    """Await `ask()` repeatedly until the result suits, and return the result. Fails after the deadline."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not suits(value := await ask()):  # noqa: ASYNC110 - the checked condition has no event to wait for
            await asyncio.sleep(_LOOK_SECONDS)
    return value


async def until(condition: Callable[[], T], seconds: float = DEADLINE_SECONDS) -> T:
    """Like `wait_until`, but without blocking the event loop."""
    give_up_at = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up_at, f"timed out after {seconds:g} s"
        await asyncio.sleep(_LOOK_SECONDS)
    return value


class Overtime:
    """Measures how long the event loop has worked since a deadline. Stalls of the machine do not count."""

    def __init__(self, deadline: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticks = -1
        self._handle = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        self._handle = self._loop.call_later(_TICK_SECONDS, self._tick)

    def end(self) -> float:
        self._handle.cancel()
        return max(0, self._ticks) * _TICK_SECONDS
