"""A provider's ceiling in emails per second, held over all workers and hosts.

The bucket is a row in PostgreSQL; a worker takes a tenth of a second's tokens at once, so the ceiling costs a statement
per chunk, not per email. While PostgreSQL is away nothing is sent: no lease can be taken then either.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from dispatcher.domain.backoff import Backoff
from dispatcher.errors import StoreUnavailable
from dispatcher.store.providers import ProviderStore
from dispatcher.telemetry.log import get_log

CHUNK_SECONDS: Final = 0.1
BURST_SECONDS: Final = 0.25
"""What the bucket holds at most: enough that workers which look ten times a second miss nothing."""
_SHORTEST_WAIT_SECONDS: Final = 0.02


class RateLimit:
    """One worker's share of a provider's rate; tokens are given in the order in which they were asked for."""

    def __init__(self, store: ProviderStore, provider: str, ceiling: float) -> None:
        """
        Args:
            ceiling: Emails per second over all workers and hosts.
        """
        self._store = store
        self._provider = provider
        self._ceiling = ceiling
        self._tokens = 0
        self._begun = False
        self._turn = asyncio.Lock()
        self._outage = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._log = get_log()

    async def take(self) -> None:
        """Returns when one email may be sent."""
        async with self._turn:
            while self._tokens < 1:
                await self._refill()
            self._tokens -= 1

    async def slow_down(self) -> None:
        """The provider throttled us: halves the rate for everybody; it climbs back by itself."""
        self._tokens = 0
        try:
            rate = await self._store.halve_rate(self._provider, self._ceiling)
        except StoreUnavailable:
            return  # the pause that follows a throttling slows us down meanwhile
        if rate is not None:
            self._log.warning("provider.slowed", provider=self._provider, per_second=round(rate, 1))

    async def _refill(self) -> None:
        wanted = max(1, math.ceil(self._ceiling * CHUNK_SECONDS))
        burst = max(1.0, self._ceiling * BURST_SECONDS)
        try:
            if not self._begun:
                await self._store.begin_rate(self._provider, self._ceiling)
                self._begun = True
            self._tokens, rate = await self._store.take_tokens(
                self._provider, ceiling=self._ceiling, burst=burst, wanted=wanted
            )
            self._outage.worked()
        except StoreUnavailable:
            await asyncio.sleep(self._outage.next_wait(lambda: 1.0))
            return
        if not self._tokens:
            await asyncio.sleep(max(_SHORTEST_WAIT_SECONDS, min(1 / rate, 1.0)))
