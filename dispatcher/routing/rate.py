"""A token bucket: a provider's ceiling in emails per second, over all workers and hosts.

The bucket is a row in PostgreSQL. One statement takes a worker's tokens for a tenth of a second, so the ceiling does
not cost one statement per email. While PostgreSQL is unreachable, workers get no tokens and send nothing. Without
PostgreSQL, they could not lease emails, either.

If emails of several lanes wait, the lanes take turns by weight. So an urgent email gets one of the next tokens, however
many bulk emails wait.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Final, NamedTuple

from dispatcher.domain.lanes import NORMAL
from dispatcher.domain.retry import Backoff
from dispatcher.domain.turns import LaneWeights, Turns
from dispatcher.errors import DispatcherError
from dispatcher.store.providers import ProviderStore
from dispatcher.telemetry.log import get_log

CHUNK_SECONDS: Final = 0.1
BURST_SECONDS: Final = 0.25
"""The bucket holds at most the tokens of this many seconds. Workers take tokens ten times per second, so the bucket
does not overflow."""
_SHORTEST_WAIT_SECONDS: Final = 0.02


class _Request(NamedTuple):
    is_wanted: Callable[[], bool]
    granted: asyncio.Future[bool]


class RateLimit:
    """One worker's tokens of a provider's rate limit. Within a lane, requests get tokens in order of arrival."""

    def __init__(self, store: ProviderStore, provider: str, ceiling: float, weights: LaneWeights | None = None) -> None:
        """`ceiling`: emails per second over all workers and hosts."""
        self._store = store
        self._provider = provider
        self._ceiling = ceiling
        self._tokens = 0
        self._is_throttled = False
        self._waiting: dict[str, deque[_Request]] = {}
        self._turns = Turns((weights or LaneWeights()).of)
        self._granting: asyncio.Task[None] | None = None
        self._outage = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._log = get_log()

    @property
    def ceiling(self) -> float:
        return self._ceiling

    async def take(self, is_wanted: Callable[[], bool] = lambda: True, lane: str = NORMAL) -> bool:
        """Waits for a token. Returns False if it is no longer wanted: 256 emails would use 256 tokens, only to find out
        that the provider's breaker has opened."""
        if self._granting is None and self._tokens >= 1 and is_wanted():
            self._tokens -= 1
            return True
        request = _Request(is_wanted, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(lane, deque()).append(request)
        if self._granting is None:
            self._granting = asyncio.create_task(self._grant())
        return await request.granted

    async def _grant(self) -> None:
        try:
            while lanes := self._open_lanes():
                if self._tokens < 1:
                    await self._refill()
                    continue
                lane = self._turns.next(lanes)
                self._turns.charge(lane)
                self._tokens -= 1
                self._waiting[lane].popleft().granted.set_result(True)
        except Exception as error:  # noqa: BLE001 - each waiting attempt handles it
            for request in chain.from_iterable(self._waiting.values()):
                if not request.granted.done():
                    request.granted.set_exception(error)
            self._waiting.clear()
        finally:
            self._granting = None

    def _open_lanes(self) -> list[str]:
        """The lanes that have a request. Ends the requests that were cancelled or are no longer wanted."""
        for lane, requests in list(self._waiting.items()):
            while requests and (requests[0].granted.done() or not requests[0].is_wanted()):
                request = requests.popleft()
                if not request.granted.done():
                    request.granted.set_result(False)
            if not requests:
                del self._waiting[lane]
        return list(self._waiting)

    def slow_down(self) -> None:
        """Halves the rate for all hosts when this worker next needs tokens; then it slowly rises again. At once would
        be useless: it would have risen before the provider's pause is over."""
        self._tokens = 0
        self._is_throttled = True

    async def _refill(self) -> None:
        """Takes tokens from the bucket. If the bucket is empty, waits until the bucket may contain tokens again."""
        wanted = max(1, math.ceil(self._ceiling * CHUNK_SECONDS))
        burst = max(1.0, self._ceiling * BURST_SECONDS)
        try:
            if self._is_throttled:
                halved = await self._store.halve_rate(self._provider, self._ceiling)
                self._is_throttled = False
                if halved is not None:
                    self._log.warning("provider.throttled", provider=self._provider, per_second=round(halved, 1))
            taken, rate = await self._store.take_tokens(
                self._provider, ceiling=self._ceiling, burst=burst, wanted=wanted
            )
        except DispatcherError:
            await asyncio.sleep(self._outage.next_wait(lambda: 1.0))
            return
        self._outage.reset()
        self._tokens = 0 if self._is_throttled else taken
        if not taken:
            await asyncio.sleep(max(_SHORTEST_WAIT_SECONDS, 1 / max(rate, 1.0)))
