"""Runs periodic services. A service that fails is logged and retried, and does not delay the other services."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from dispatcher.domain.retry import Backoff
from dispatcher.errors import DispatcherError, StatementRefused, StoreUnavailable
from dispatcher.host.clock import seconds_to_tick
from dispatcher.host.lifecycle import raise_on_stray_cancel
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

FIRST_WAIT_SECONDS: Final = 1.0
EARLY_SECONDS: Final = 0.002
"""A round may begin this much before it is due, because a timer of the event loop may be early by a millisecond."""
LONGEST_WAIT_SECONDS: Final = 60.0
"""The longest wait before a failed task is started again. If a task ran for longer than this time before it failed, the
next wait is the shortest wait again."""
END_SECONDS: Final = 2.0
"""The longest wait for cancelled tasks, so that an unresponsive server does not delay the exit."""


class Service(Protocol):
    """Work that is done in rounds, at an interval."""

    @property
    def interval_seconds(self) -> float:
        """The time from one round, even if it failed, to the next. Rounds begin at multiples of this time, so that the
        services of a process wake it together. A round that takes long is followed by a wait of half of this time."""
        ...

    async def run_once(self) -> float | None:
        """Does the work of one round. Returns the seconds until the next round, or None for the interval."""
        ...


class Periodic:
    """Runs a service at its interval. Start `run` as a task, or call `run_if_due` in a loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._due_at = 0.0
        self.woken = asyncio.Event()  # makes `run` begin the next round at once
        self._logged: type[DispatcherError] | None = None  # the fault that was logged since the last success

    @property
    def wait_seconds(self) -> float:
        return max(0.0, self._due_at - time.monotonic())

    async def run_if_due(self) -> None:
        """Runs a round if one is due, and raises its exception. If PostgreSQL refuses a statement, for example because
        of a damaged row, logs one line until a round succeeds, and raises nothing: the process's other services do not
        depend on this row."""
        if time.monotonic() >= self._due_at - EARLY_SECONDS:
            self._due_at = time.monotonic() + seconds_to_tick(self.service.interval_seconds)
            try:
                seconds = await self.service.run_once()
            except StatementRefused as error:
                metrics.STATEMENTS_REFUSED.add(1, "service")
                if self._logged is not StatementRefused:
                    get_log().error("service.refused", service=type(self.service).__name__, reason=error.message)
                self._logged = StatementRefused
                return
            self._logged = None
            if seconds is None:
                seconds = seconds_to_tick(self.service.interval_seconds)
            self._due_at = time.monotonic() + seconds

    async def run(self) -> None:
        """Runs round after round until cancelled. During an outage of PostgreSQL, logs one line, and retries."""
        while True:
            self.woken.clear()
            try:
                await self.run_if_due()
            except StoreUnavailable as error:
                if self._logged is not StoreUnavailable:
                    seconds = self.service.interval_seconds
                    get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=seconds)
                self._logged = StoreUnavailable
            with suppress(TimeoutError):
                async with asyncio.timeout(self.wait_seconds):
                    await self.woken.wait()
                    self._due_at = 0.0


class Task(Protocol):
    """Work that runs as long as its process."""

    async def run(self) -> None:
        """Does the work until cancelled. If this method raises an exception, `run_tasks` logs it, and calls the method
        again after a wait."""
        ...


async def run_tasks(
    tasks: Sequence[Task], stop: asyncio.Event, *, process: str, first_wait_seconds: float = FIRST_WAIT_SECONDS
) -> None:
    """Runs all tasks until `stop` is set. The wait before a failed task runs again doubles with each further
    failure."""
    running = [asyncio.create_task(_run_task(task, process, first_wait_seconds)) for task in tasks]
    try:
        await stop.wait()
    finally:
        for each in running:
            each.cancel()
        if running:
            await asyncio.wait(running, timeout=END_SECONDS)


async def _run_task(task: Task, process: str, first_wait_seconds: float) -> None:
    backoff = Backoff(base_seconds=first_wait_seconds, cap_seconds=LONGEST_WAIT_SECONDS)
    while True:
        began_at = time.monotonic()
        try:
            await raise_on_stray_cancel(task.run)
        except Exception as error:  # noqa: BLE001 - one task's failure must not end the others
            subject = task.service if isinstance(task, Periodic) else task
            get_log().error("error.unexpected", where=f"{process}: {type(subject).__name__}", error=_described(error))
        else:
            return
        if time.monotonic() - began_at > LONGEST_WAIT_SECONDS:
            backoff.reset()
        # Wait at least half of the backoff, because retries after very short waits would fill the log.
        await asyncio.sleep(backoff.next_wait(lambda: 0.5 + random.random() / 2))  # noqa: S311


def _described(error: Exception) -> str:
    """Describes an exception for the log: not ours only by type and location, because its message may be private."""
    if isinstance(error, DispatcherError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
