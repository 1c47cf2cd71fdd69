"""Tasks side by side, none of which ends another."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from dispatcher.domain.backoff import Backoff
from dispatcher.errors import DispatcherError
from dispatcher.host.lifecycle import unless_cut_off
from dispatcher.telemetry.log import get_log

FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0
"""A task that ran for longer than this was well; its next failure counts as the first."""
END_SECONDS: Final = 2.0
"""For what a task does when it is cancelled; a server that is silent must not delay the end."""


class Task(Protocol):
    """Something that the monitor does for as long as it runs."""

    async def run(self) -> None:
        """Works until it is cancelled. What it raises is logged, and it is called again after a while."""
        ...


async def keep(tasks: Sequence[Task], stop: asyncio.Event, *, first_wait_seconds: float = FIRST_WAIT_SECONDS) -> None:
    """Runs all of them until the stop.

    Args:
        first_wait_seconds: Before a task that failed is called again; doubles while it fails.
    """
    running = [asyncio.create_task(_keep_one(task, first_wait_seconds)) for task in tasks]
    try:
        await stop.wait()
    finally:
        for each in running:
            each.cancel()
        if running:
            await asyncio.wait(running, timeout=END_SECONDS)


async def _keep_one(task: Task, first_wait_seconds: float) -> None:
    backoff = Backoff(base_seconds=first_wait_seconds, cap_seconds=LONGEST_WAIT_SECONDS)
    while True:
        began_at = time.monotonic()
        try:
            await unless_cut_off(task.run)
        except Exception as error:  # noqa: BLE001 - the edge of a loop: whatever one task meets, the others watch on
            where = f"monitor: {type(task).__name__}"
            get_log().error("fault.unexpected", where=where, error=_described(error))
        else:
            return
        if time.monotonic() - began_at > LONGEST_WAIT_SECONDS:
            backoff.worked()
        # Half of the wait is certain: a jitter down to nothing would fill the log.
        await asyncio.sleep(backoff.next_wait(lambda: 0.5 + random.random() / 2))  # noqa: S311


def _described(error: Exception) -> str:
    """A fault of ours in its words; of anything else the kind and the place, because its words may hold values."""
    if isinstance(error, DispatcherError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
