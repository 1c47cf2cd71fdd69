"""How a child process learns that it has to stop: SIGTERM, or the end of its parent."""

from __future__ import annotations

import asyncio
import os
import signal


def stop_event(lifeline: int) -> asyncio.Event:
    """An event of the running loop that is set once, when this process has to drain.

    Args:
        lifeline: A pipe of which the parent holds the other end; EOF means that it is gone.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def parent_gone() -> None:
        if not os.read(lifeline, 1):
            loop.remove_reader(lifeline)
            stop.set()

    loop.add_reader(lifeline, parent_gone)
    return stop


async def unless_stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Waits so long, or until the stop; returns whether to go on."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return True
    return False
