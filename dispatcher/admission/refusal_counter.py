"""Counts refused requests and emails by problem code, for metrics and the log. No content is logged."""

from __future__ import annotations

import asyncio
import collections
from typing import Final

from dispatcher.telemetry.log import get_log
from dispatcher.telemetry.meters import Counter

LOG_INTERVAL_SECONDS: Final = 60.0


class RefusalCounter:
    """How often this process answered with each problem code since the process started."""

    def __init__(self, meter: Counter, event: str) -> None:
        """`event`: of the log, with the new refusals of each minute."""
        self._meter, self._event = meter, event
        self.counts: collections.Counter[str] = collections.Counter()
        self._logged: collections.Counter[str] = collections.Counter()

    def count(self, code: str) -> None:
        """Counts one refused request, or one refused email of a batch."""
        self.counts[code] += 1
        self._meter.add(1, code)

    async def run(self) -> None:
        """Logs new refusals once a minute until cancelled."""
        while True:
            await asyncio.sleep(LOG_INTERVAL_SECONDS)
            self.log_new()

    def log_new(self) -> None:
        """Logs the refusals since the last call, if there are any."""
        new = self.counts - self._logged
        if new:
            get_log().info(self._event, counts=dict(new))
            self._logged = self.counts.copy()
