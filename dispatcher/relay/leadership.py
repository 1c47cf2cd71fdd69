"""Which relay publishes for the database: one whose connection to RabbitMQ is open, as long as there is one.

    stands by ──turn is free; publisher is open, or no other is──▶ leads
        ▲                                                                 │
        └── publisher is away for GIVE_UP_SECONDS, another relay is ready ┘

The turn (`store.turns`) is the leadership. A second name, which any number of sessions share, says that a relay is
ready: its publisher is open. A leader without RabbitMQ ends its session only if another relay is ready. If no relay
reaches RabbitMQ, the leader stays: expired leases are still rescued, and the turn does not move back and forth.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from dispatcher.broker.publisher import Publisher
from dispatcher.errors import BrokerUnavailable
from dispatcher.store import turns
from dispatcher.store.connections import AsyncSession

LEADER: Final = "relay"
READY: Final = "relay_ready"
IDLE_SECONDS: Final = 60.0
"""A relay that works says something four times a second; one that waits for RabbitMQ, within half a minute. Whoever
does not comes back with another session, and leads if nobody else does."""
GIVE_UP_SECONDS: Final = 3.0
"""Longer than it takes to connect again after a restart of a node."""
CONNECT_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 1.0
"""Between two looks for a relay that is ready; only where our own publisher is away."""


class Leadership:
    """Whether one session leads."""

    def __init__(self, session: AsyncSession, publisher: Publisher, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._session = session
        self._publisher = publisher
        self._idle_seconds = idle_seconds
        self._is_ready = False
        self._open_at = time.monotonic()
        self._look_at = 0.0
        self._opening: asyncio.Task[None] | None = None

    async def gain(self) -> bool:
        """Whether this session leads from now on; connects to RabbitMQ first.

        Raises:
            StoreUnavailable: the session is gone.
        """
        await self._open()
        await self._say_ready(is_ready=self._publisher.is_open)
        if not self._is_ready and await turns.is_shared_by_another(self._session, READY):
            return False
        self._open_at = time.monotonic()
        return await turns.take(self._session, LEADER, idle_seconds=self._idle_seconds)

    async def must_be_given_up(self) -> bool:
        """Whether RabbitMQ is away from us and another relay can publish; sends no query while our publisher is open.

        Raises:
            StoreUnavailable: the session is gone.
        """
        now = time.monotonic()
        if self._publisher.is_open:
            self._open_at = now
            await self._say_ready(is_ready=True)
            return False
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        if now < max(self._open_at + GIVE_UP_SECONDS, self._look_at):
            return False
        self._look_at = now + LOOK_SECONDS
        await self._say_ready(is_ready=False)
        return await turns.is_shared_by_another(self._session, READY)

    async def close(self) -> None:
        """Stops connecting. Idempotent."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    async def _open(self) -> None:
        with suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._publisher.open()

    async def _say_ready(self, *, is_ready: bool) -> None:
        if is_ready is not self._is_ready:
            await turns.share(self._session, READY, is_shared=is_ready)
            self._is_ready = is_ready
