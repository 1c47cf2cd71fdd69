"""Look-ups of host names do not wait for other blocking calls of the process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from dispatcher.host.name_lookup import resolve
from tests.waiting import DEADLINE_SECONDS


async def test_a_name_is_resolved_while_all_threads_of_the_loop_are_occupied() -> None:
    loop, ended = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    occupied = loop.run_in_executor(None, ended.wait)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            found = await resolve("localhost", 443)
    finally:
        ended.set()
        await occupied

    assert set(found) & {"127.0.0.1", "::1"}
    assert len(found) == len(set(found))
