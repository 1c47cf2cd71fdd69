"""The connections that one worker keeps to one SMTP server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from dispatcher.providers.smtp_connection import Connection
from dispatcher.providers.smtp_conversation import GOODBYE_SECONDS


class ConnectionPool:
    """Up to so many connections; whoever wants one holds a place first.

        async with pool.place():
            connection = pool.idle() or await pool.open()
            …
            pool.give_back(connection)

    Idle connections are taken last in, first out, so that what a quiet hour does not need grows cold and is dropped.
    """

    def __init__(
        self,
        open_one: Callable[[], Awaitable[Connection]],
        *,
        connections: int,
        emails_per_connection: int,
        trusted_idle_seconds: float,
    ) -> None:
        self._open_one = open_one
        self._places = asyncio.Semaphore(connections)
        self._emails_per_connection = emails_per_connection
        self._trusted_idle_seconds = trusted_idle_seconds
        self._idle: deque[Connection] = deque()
        self._leaving: set[asyncio.Future[None]] = set()

    def place(self) -> asyncio.Semaphore:
        """The right to use one connection; entering waits for it, first come, first served."""
        return self._places

    def idle(self) -> Connection | None:
        """A kept connection that looks sound; None if there is none. The caller holds a place."""
        while self._idle:
            connection = self._idle.pop()
            if connection.conversation.is_sound:
                age = asyncio.get_running_loop().time() - connection.idle_since
                connection.needs_reset = connection.needs_reset or age >= self._trusted_idle_seconds
                return connection
            connection.conversation.abort()
        return None

    async def open(self) -> Connection:
        """A new connection. The caller holds a place.

        Raises:
            NotConnected, ProviderFault: as `open_connection` has it.
        """
        return await self._open_one()

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next email; or end it, if it is worn out, broken or out of step."""
        if not connection.conversation.is_sound:
            connection.conversation.abort()
        elif connection.emails >= self._emails_per_connection:
            self._say_goodbye(connection)
        else:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)

    async def close(self) -> None:
        """End every idle connection; returns when they have ended. Again is harmless."""
        while self._idle:
            self._say_goodbye(self._idle.pop())
        if self._leaving:
            await asyncio.wait(set(self._leaving), timeout=2 * GOODBYE_SECONDS)

    def _say_goodbye(self, connection: Connection) -> None:
        closed = connection.conversation.quit()
        self._leaving.add(closed)
        closed.add_done_callback(self._leaving.discard)
