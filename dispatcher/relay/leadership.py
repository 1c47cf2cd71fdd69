"""Elects the relay that publishes for the database. Prefers a relay that is connected to RabbitMQ.

    standby ──the lock is free; this relay is ready, or no other relay is ───▶ leader
        ▲                                                                        │
        └── disconnected for GIVE_UP_SECONDS, and another relay is ready ────────┘

The leader holds a named lock in PostgreSQL (`store.named_locks`). A standby that is connected to RabbitMQ also takes a
second lock, which shows that a relay is ready to lead; of several such standbys, one holds this lock. A leader holds a
third lock while RabbitMQ blocks its messages because of an alarm, so that monitors and commands can say so. A leader
that cannot reach RabbitMQ gives up the lead only if another relay is ready. If no relay can reach RabbitMQ, the leader
keeps the lead: it still recovers expired leases, and the lead does not move back and forth between relays.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Final

from dispatcher.broker.publisher import Publisher
from dispatcher.errors import BrokerUnavailable
from dispatcher.store import named_locks
from dispatcher.store.connections import AsyncSession

LEADER: Final = "relay"
READY: Final = "relay_ready"
IDLE_SECONDS: Final = 60.0
"""PostgreSQL ends a leader's session that is idle for longer than this, so a frozen relay loses the lead. A working
relay sends two queries per second, and a relay that waits for RabbitMQ sends at least one query in half a minute."""
GIVE_UP_SECONDS: Final = 3.0
"""How long a leader may be disconnected from RabbitMQ before it gives up the lead to a ready relay. A reconnect after
the restart of a RabbitMQ node takes less time."""
CONNECT_SECONDS: Final = 3.0
POLL_SECONDS: Final = 1.0
"""How often a leader that is disconnected from RabbitMQ checks whether another relay is ready."""


class Leadership:
    """Makes this relay the leader, for as long as one database session is open. Decides when to give up the lead."""

    def __init__(self, session: AsyncSession, publisher: Publisher) -> None:
        self._session = session
        self._publisher = publisher
        self._locks: set[str] = set()
        self._open_at = time.monotonic()
        self._next_poll_at = 0.0
        self._opening: asyncio.Task[None] | None = None

    async def acquire(self) -> bool:
        """Connects to RabbitMQ, then tries to become the leader. Returns whether this relay is now the leader."""
        await self._open()
        if self._publisher.is_open:
            wanted = [LEADER, READY]
        else:
            await self._release(READY)
            if await named_locks.is_held_by_another(self._session, READY):
                return False
            wanted = [LEADER]
        self._open_at = time.monotonic()
        await self._acquire(*wanted)
        if LEADER not in self._locks:
            return False
        await self._release(READY)  # another standby can now show that it is ready
        return True

    async def must_release(self) -> bool:
        """Whether to give up the lead, because RabbitMQ is out of reach and another relay is ready. While nothing
        changes between this relay and RabbitMQ, sends no query."""
        now = time.monotonic()
        if self._publisher.is_blocked:
            await self._acquire(named_locks.RELAY_BLOCKED)
        else:
            await self._release(named_locks.RELAY_BLOCKED)
        if self._publisher.is_open:
            self._open_at = now
            return False
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        if now < max(self._open_at + GIVE_UP_SECONDS, self._next_poll_at):
            return False
        self._next_poll_at = now + POLL_SECONDS
        return await named_locks.is_held_by_another(self._session, READY)

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    async def _open(self) -> None:
        with suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._publisher.open()

    async def _acquire(self, *names: str) -> None:
        if missing := [name for name in names if name not in self._locks]:
            self._locks |= await named_locks.acquire_free(self._session, missing)

    async def _release(self, name: str) -> None:
        if name in self._locks:
            await named_locks.release_named_lock(self._session, name)
            self._locks.remove(name)
