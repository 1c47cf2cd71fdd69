"""Counts refused requests and emails by problem code, for metrics and the log. No content is logged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from dispatcher.telemetry.log import get_log

LOG_INTERVAL_SECONDS: Final = 60.0


class RefusalCounter:
    """How often this process answered with each problem code since the process started."""

    def __init__(self, noun: str, meter: Callable[[str], None]) -> None:
        """`noun`: of the log event `<noun>.refused`, with the new refusals of each minute. `meter` counts a code."""
        self._noun, self._meter = noun, meter
        self.counts: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()

    def count(self, code: str) -> None:
        """Counts one refused request, or one refused email of a batch."""
        self.counts[code] += 1
        self._meter(code)

    async def run(self) -> None:
        """Logs new refusals once a minute until cancelled."""
        while True:
            await asyncio.sleep(LOG_INTERVAL_SECONDS)
            self.log_new()

    def log_new(self) -> None:
        """Logs the refusals since the last call, if there are any."""
        new = self.counts - self._logged
        if new:
            get_log().info(f"{self._noun}.refused", counts=dict(new))
            self._logged = self.counts.copy()
