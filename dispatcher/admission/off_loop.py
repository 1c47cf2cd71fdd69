"""Parses large bodies in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

LARGE_BYTES: Final = 64 * 1024
"""From this size, a body is parsed in a thread, so that the event loop can serve other requests."""

T = TypeVar("T")

_LARGE_BODY_THREAD: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large bodies")
"""The thread that parses large bodies. More threads would compete with the event loop for the GIL, and parse no
faster."""


async def run_off_loop(size: int, work: Callable[[], T]) -> T:
    """Runs `work` on a body of this size and returns its result. Uses a thread if the body is large."""
    if size < LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_LARGE_BODY_THREAD, work)
