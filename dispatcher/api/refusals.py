"""Refusals, counted by reason, in the metrics and for the log; what was refused is never told, for it is private."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

TELL_EVERY_SECONDS: Final = 60.0


class Refusals:
    """How often each reason was one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    def count(self, code: str) -> None:
        """One more request or email was refused."""
        self.counts[code] += 1
        metrics.API_REFUSALS.add(1, code)

    async def run(self) -> None:
        """Tells the log once a minute what came since, until cancelled."""
        while True:
            await asyncio.sleep(TELL_EVERY_SECONDS)
            self.tell()

    def tell(self) -> None:
        """Tells the log what came since it was told last."""
        new = self.counts - self._told
        if new:
            get_log().info("api.refused", counts=dict(new))
            self._told = self.counts.copy()
