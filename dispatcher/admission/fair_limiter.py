"""Limits the resources, such as memory, that all requests in progress use in total.

One caller gets at most half of each resource, or enough for one request of the largest size. A `FairLimiter` refuses
what exceeds a limit. A `FairTurns` lets it wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from dispatcher.admission.problems import Problem
from dispatcher.store.connections import AsyncSession, Pool, session

TURN_SECONDS: Final = 5.0
"""How long a request waits for its turn before it is refused."""


class FairLimiter:
    """A counted resource that several callers share, such as request slots or bytes of memory."""

    def __init__(
        self, max_total: int, *, max_request: int = 1, callers: int = 2, part_of: tuple[FairLimiter, str] | None = None
    ) -> None:
        """
        Args:
            max_request: The most that a single request may need. A caller without other requests gets this amount even
                if it is more than its share of the total.
            callers: How many callers can use their whole share at the same time.
            part_of: Another limiter, from which this limiter's callers acquire the same, as one caller with this name.
        """
        self._max_total = max(max_total, max_request)
        self.max_per_caller = max(max_total // callers, max_request)
        self._part_of = part_of
        self._total = 0
        self._acquired: dict[str, int] = {}

    def acquire(self, name: str, amount: int = 1) -> None:
        """Acquires an amount for the caller with this name, or raises `overloaded` and acquires nothing."""
        acquired = self._acquired.get(name, 0) + amount
        # Each `Problem` below closes the connection, because a part of the request's body may be unread.
        if acquired > self.max_per_caller:
            detail = (
                "This caller has too many requests or too much data in progress. Send fewer requests in parallel, or "
                "retry later."
            )
            raise Problem("overloaded", detail, retry_after=1, closes=True)
        if self._total + amount > self._max_total:
            raise Problem("overloaded", "Retry the request.", retry_after=1, closes=True)
        if self._part_of is not None:
            whole, part = self._part_of
            whole.acquire(part, amount)
        self._acquired[name] = acquired
        self._total += amount

    def release(self, name: str, amount: int = 1) -> None:
        """Releases an amount that `acquire` has acquired."""
        if self._part_of is not None:
            whole, part = self._part_of
            whole.release(part, amount)
        self._total -= amount
        remaining = self._acquired[name] - amount
        if remaining:
            self._acquired[name] = remaining
        else:
            del self._acquired[name]


class FairTurns:
    """Permits, such as database sessions, for which callers wait in turns. One caller has at most half of the permits.

    So a caller that stays within its half is not delayed by one other caller, however many requests that one sends.
    """

    def __init__(self, permits: int, *, seconds: float = TURN_SECONDS) -> None:
        """`permits`: how many there are, at least 2. `seconds`: how long a request waits for one."""
        self._free = permits
        self._max_per_caller = permits // 2
        self._seconds = seconds
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Waits for a permit, and holds it during the block, in the name of a caller. Raises `overloaded`."""
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(permit)
        self._grant()
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    await permit
            except TimeoutError:
                detail = "Too many requests wait for their turn. Send fewer requests in parallel, or retry later."
                raise Problem("overloaded", detail, retry_after=1) from None
            yield
        finally:
            if not permit.cancelled():
                self._free += 1
                self._held -= Counter([name])
                self._grant()

    def _grant(self) -> None:
        """Gives the free permits to requests that wait. Callers take turns; one caller's requests stay in order."""
        while self._free:
            name = next((each for each in self._waiting if self._held[each] < self._max_per_caller), None)
            if name is None:
                return
            permits = self._waiting.pop(name)
            permit = permits.popleft()
            if permits:
                self._waiting[name] = permits  # behind all other callers
            if not permit.done():
                self._free -= 1
                self._held[name] += 1
                permit.set_result(None)


class FairSessions:
    """A pool of database sessions. One caller has at most half of them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._turns = FairTurns(pool.max_size)

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[AsyncSession]:
        """A session for a caller's request. Raises as `FairTurns.turn` and `store.connections.session`."""
        async with self._turns.turn(name), session(self._pool) as connection:
            yield connection
