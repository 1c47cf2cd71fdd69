"""Waiting for what must come true: with a deadline, and never for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

DEADLINE_SECONDS: Final = 20.0
"""Far above what anything here takes; only a failing test waits so long."""
_LOOK_SECONDS: Final = 0.005
_TICK_SECONDS: Final = 0.05


def wait_until(condition: Callable[[], T], seconds: float = DEADLINE_SECONDS) -> T:
    """What the condition gave when it first held; looks again until the deadline."""
    give_up_at = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up_at, "what was waited for did not come true"
        time.sleep(_LOOK_SECONDS)
    return value


async def until_answer(ask: Callable[[], Awaitable[T]], seconds: float = DEADLINE_SECONDS) -> T:
    """The first answer that holds; asks again until the deadline."""
    async with asyncio.timeout(seconds):
        while not (value := await ask()):  # noqa: ASYNC110 - what is asked can wake nobody
            await asyncio.sleep(_LOOK_SECONDS)
    return value


async def until(condition: Callable[[], T], seconds: float = DEADLINE_SECONDS) -> T:
    """The same in the running loop."""
    give_up_at = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up_at, "what was waited for did not come true"
        await asyncio.sleep(_LOOK_SECONDS)
    return value


class Overtime:
    """How long the running loop has worked since a deadline; while the machine stands still, nobody is late."""

    def __init__(self, deadline: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticks = -1
        self._handle = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        self._handle = self._loop.call_later(_TICK_SECONDS, self._tick)

    def end(self) -> float:
        """Stops the watch; returns what it shows, in seconds."""
        self._handle.cancel()
        return max(0, self._ticks) * _TICK_SECONDS
