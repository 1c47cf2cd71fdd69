"""Limits how often one event is logged. Without a limit, thousands of emails would log the same event while a server is
unreachable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

import structlog
from structlog.typing import EventDict

from dispatcher.domain.values import dataclass

WINDOW_SECONDS: Final = 10.0
LINES_PER_WINDOW: Final = 100
UNLIMITED: Final = frozenset({"email.attempted", "email.recovered", "process.started", "process.exited"})
"""Events that are never suppressed: operators need every attempt and recovery of an email, and every start and exit of
a process. Process events stay few, because the waits between a process's starts grow."""


@dataclass(slots=True)
class _Window:
    ends_at: float
    lines: int = 0
    suppressed: int = 0


class StormLimit:
    """A structlog processor that lets `LINES_PER_WINDOW` lines of each event pass in `WINDOW_SECONDS`. The event's next
    line after that time has the number of dropped lines in the field `suppressed`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def __call__(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        name = event["event"]
        if name in UNLIMITED:
            return event
        window, now = self._windows.get(name), self._clock()
        if window is None or now >= window.ends_at:
            if window is not None and window.suppressed:
                event["suppressed"] = window.suppressed
            window = self._windows[name] = _Window(now + WINDOW_SECONDS)
        window.lines += 1
        if window.lines > LINES_PER_WINDOW:
            window.suppressed += 1
            raise structlog.DropEvent
        return event


class CountedLine:
    """Limits an event to one line per period. Each line contains the number of events since the previous line."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._count = 0
        self._due_at = -math.inf

    def due(self, count: int = 1) -> int:
        """Adds to the count. If a line is due, returns the count and resets it to 0; otherwise returns 0."""
        self._count += count
        now = self._clock()
        if not self._count or now < self._due_at:
            return 0
        due, self._count, self._due_at = self._count, 0, now + self._seconds
        return due
