"""Services: what a process does again and again. One that fails is logged and tried again, and delays no other."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from dispatcher.domain.backoff import Backoff
from dispatcher.errors import DispatcherError, StoreUnavailable
from dispatcher.host.lifecycle import unless_cut_off
from dispatcher.telemetry.log import get_log

FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0
"""A task that ran for longer than this was well; its next failure counts as the first."""
END_SECONDS: Final = 2.0
"""For what a task does when it is cancelled; a server that is silent must not delay the end."""


class Service(Protocol):
    """Work that is done in rounds."""

    @property
    def interval_seconds(self) -> float:
        """From the end of one round to the next, also after a round that failed."""
        ...

    async def run_once(self) -> float | None:
        """One round. Returns in how many seconds the next is due, where that is not the interval."""
        ...


class Periodic:
    """A service and when it is due: a task of its own, or a step in somebody's loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._due_at = 0.0
        self._is_failing = False

    async def run_if_due(self) -> None:
        """Runs a round if it is due. What the round raises is raised, and the next round comes in its time."""
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + self.service.interval_seconds
            seconds = await self.service.run_once()
            self._due_at = time.monotonic() + (self.service.interval_seconds if seconds is None else seconds)

    async def run(self) -> None:
        """See `Task`. A PostgreSQL that is away is logged once and waited for."""
        while True:
            try:
                await self.run_if_due()
                self._is_failing = False
            except StoreUnavailable as error:
                if not self._is_failing:
                    seconds = self.service.interval_seconds
                    get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=seconds)
                self._is_failing = True
            await asyncio.sleep(max(0.0, self._due_at - time.monotonic()))


class Task(Protocol):
    """Something that a process does for as long as it runs."""

    async def run(self) -> None:
        """Works until it is cancelled. What it raises is logged, and it is called again after a while."""
        ...


async def keep(
    tasks: Sequence[Task], stop: asyncio.Event, *, process: str, first_wait_seconds: float = FIRST_WAIT_SECONDS
) -> None:
    """Runs all of them until the stop.

    Args:
        process: Whose tasks they are, for the log.
        first_wait_seconds: Before a task that failed is called again; doubles while it fails.
    """
    running = [asyncio.create_task(_keep_one(task, process, first_wait_seconds)) for task in tasks]
    try:
        await stop.wait()
    finally:
        for each in running:
            each.cancel()
        if running:
            await asyncio.wait(running, timeout=END_SECONDS)


async def _keep_one(task: Task, process: str, first_wait_seconds: float) -> None:
    backoff = Backoff(base_seconds=first_wait_seconds, cap_seconds=LONGEST_WAIT_SECONDS)
    while True:
        began_at = time.monotonic()
        try:
            await unless_cut_off(task.run)
        except Exception as error:  # noqa: BLE001 - the edge of a loop: whatever one task meets, the others go on
            subject = task.service if isinstance(task, Periodic) else task
            get_log().error("error.unexpected", where=f"{process}: {type(subject).__name__}", error=_described(error))
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
