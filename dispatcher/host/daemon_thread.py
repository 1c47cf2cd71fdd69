"""Runs a blocking call in a thread that does not delay the exit of the process."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Calls `work` in a daemon thread. If the future is cancelled, the thread continues, and the result is dropped."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def settle(finish: Callable[[], None]) -> None:
        if not found.done():
            finish()

    def run() -> None:
        finish: Callable[[], None]
        try:
            finish = functools.partial(found.set_result, work())
        except Exception as error:  # noqa: BLE001 - becomes the future's exception
            finish = functools.partial(found.set_exception, error)
        with suppress(RuntimeError):  # raised if the loop is closed
            loop.call_soon_threadsafe(settle, finish)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found
