"""How a process learns that it has to stop, by a signal or the end of its parent; and that it works until then."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, ParamSpec, TypeVar

from dispatcher.errors import DispatcherError
from dispatcher.host.roster import Post, Seat

BEAT_SECONDS: Final = 0.5

P = ParamSpec("P")
T = TypeVar("T")


class CutOff(DispatcherError):
    """Work ended that nobody has told to end."""


def stop_event(post: Post) -> asyncio.Event:
    """An event of the running loop that is set once, when this process has to drain.

    From now on the loop also beats, until it is closed: by a timer and not by a task, so that it goes on while tasks
    are cancelled, and not by a thread, which would beat on where the loop stands still.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    heed(stop, signal.SIGTERM)

    def parent_gone() -> None:
        if not os.read(post.lifeline, 1):
            loop.remove_reader(post.lifeline)
            stop.set()

    loop.add_reader(post.lifeline, parent_gone)
    _beat(loop, post.seat)
    return stop


def heed(stop: asyncio.Event, *numbers: signal.Signals) -> None:
    """From now on these signals set an event of the running loop, and end nobody, not even when the loop is closed."""
    loop = asyncio.get_running_loop()

    def told(_number: int, _frame: object) -> None:
        with suppress(RuntimeError):  # The loop is closed: we are about to end.
            loop.call_soon_threadsafe(stop.set)

    # Not the loop's own handlers: they go with the loop, and the signal that comes then would kill us as we end.
    for number in numbers:
        signal.signal(number, told)


def _beat(loop: asyncio.AbstractEventLoop, seat: Seat) -> None:
    seat.beat()
    loop.call_later(BEAT_SECONDS, _beat, loop, seat)


async def unless_cut_off(work: Callable[P, Coroutine[Any, Any, T]], *given: P.args, **named: P.kwargs) -> T:
    """What the work returns, called with the rest; a fault if it was cancelled, and not because we were told to end.

    Where something that it waits for is cancelled, by a library say, that comes up as if somebody had cancelled the
    work itself: a task group goes on without it, and nobody notices that its work is done no more.

    Raises:
        CutOff: it was.
    """
    try:
        return await work(*given, **named)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CutOff("What it waited for was cancelled.") from error


async def unless_stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Waits so long, or until the stop; returns whether to go on."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return True
    return False
