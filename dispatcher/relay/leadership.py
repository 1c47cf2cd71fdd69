"""Which relay publishes for the database: one whose connection to RabbitMQ is open, as long as there is one.

    stands by ──lock is free; publisher is open, or no other is──▶ leads
        ▲                                                                 │
        └── publisher is away for GIVE_UP_SECONDS, another relay is ready ┘

A session's advisory lock is the leadership. A second lock, which any number of sessions share, says that a relay is
ready: its publisher is open. A leader without RabbitMQ gives the first lock up only to a relay that holds the second.
If no relay reaches RabbitMQ, the leader stays: expired leases are still rescued, and the lock does not
move back and forth.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from dispatcher.broker.publisher import Publisher
from dispatcher.errors import BrokerUnavailable
from dispatcher.store.outbox import Outbox

GIVE_UP_SECONDS: Final = 3.0
"""Longer than it takes to connect again after a restart of a node."""
CONNECT_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 1.0
"""Between two looks for a relay that is ready; only where our own publisher is away."""


class Leadership:
    """Whether one session leads."""

    def __init__(self, outbox: Outbox, publisher: Publisher) -> None:
        self._outbox = outbox
        self._publisher = publisher
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
        if not self._is_ready and await self._outbox.has_ready_relay():
            return False
        self._open_at = time.monotonic()
        return await self._outbox.try_lock()

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
        return await self._outbox.has_ready_relay()

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
            await self._outbox.say_ready(is_ready=is_ready)
            self._is_ready = is_ready
