"""A provider's ceiling in emails per second, held over all workers and hosts.

The bucket is a row in PostgreSQL; a worker takes a tenth of a second's tokens at once, so the ceiling costs a statement
per chunk, not per email. While PostgreSQL is away nothing is sent: no lease can be taken then either.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from dispatcher.domain.backoff import Backoff
from dispatcher.errors import DispatcherError
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
        self._is_throttled = False
        self._turn = asyncio.Lock()
        self._outage = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._log = get_log()

    @property
    def ceiling(self) -> float:
        """Emails per second over all workers and hosts."""
        return self._ceiling

    async def take(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Returns True when one email may be sent; False as soon as a look finds that it is not wanted any more.

        Args:
            is_wanted: Whether the provider may be tried at all. Without it, a worker with 256 emails in hand would need
                256 tokens to find out that it may not.
        """
        async with self._turn:
            while is_wanted():
                if self._tokens >= 1:
                    self._tokens -= 1
                    return True
                await self._refill()
        return False

    def slow_down(self) -> None:
        """The provider throttled us: when its pause is over the rate is half for everybody; it climbs back by itself.

        Not at once: it would have climbed back before the pause is over.
        """
        self._tokens = 0
        self._is_throttled = True

    async def _refill(self) -> None:
        """Takes what the bucket has; where that is nothing, returns when there may be something."""
        wanted = max(1, math.ceil(self._ceiling * CHUNK_SECONDS))
        burst = max(1.0, self._ceiling * BURST_SECONDS)
        try:
            if self._is_throttled:
                await self._halve()
            taken, rate = await self._store.take_tokens(
                self._provider, ceiling=self._ceiling, burst=burst, wanted=wanted
            )
        except DispatcherError:
            await asyncio.sleep(self._outage.next_wait(lambda: 1.0))
            return
        self._outage.worked()
        self._tokens = 0 if self._is_throttled else taken
        if not taken:
            await asyncio.sleep(max(_SHORTEST_WAIT_SECONDS, 1 / max(rate, 1.0)))

    async def _halve(self) -> None:
        rate = await self._store.halve_rate(self._provider, self._ceiling)
        self._is_throttled = False
        if rate is not None:
            self._log.warning("provider.throttled", provider=self._provider, per_second=round(rate, 1))
