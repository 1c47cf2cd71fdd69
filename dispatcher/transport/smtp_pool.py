"""The connections that one worker keeps to one SMTP server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from dispatcher.transport.smtp_connection import SmtpConnection
from dispatcher.transport.smtp_conversation import GOODBYE_SECONDS

TRUSTED_IDLE_SECONDS: Final = 5.0
"""A connection that was idle for longer is probed (RSET) before it carries an email, because servers and firewalls drop
idle ones silently."""
FULL_SECONDS: Final = 30.0
"""How long we do with one connection less after the server said that it has enough of us."""


class ConnectionPool:
    """Up to so many connections; whoever wants one holds a place first.

        await pool.enter()
        try:
            connection = pool.idle() or await pool.open()
            …
            pool.give_back(connection)
        finally:
            pool.leave()

    Idle connections are taken last in, first out, so that what a quiet hour does not need grows cold and is dropped.
    """

    def __init__(
        self,
        open_one: Callable[[], Awaitable[SmtpConnection]],
        *,
        connections: int,
        emails_per_connection: int,
        trusted_idle_seconds: float,
    ) -> None:
        self._open_one = open_one
        self._places = asyncio.Semaphore(connections)
        self._most_withheld = connections - 1
        self._emails_per_connection = emails_per_connection
        self._trusted_idle_seconds = trusted_idle_seconds
        self._idle: deque[SmtpConnection] = deque()
        self._alive = 0
        self._leaving: set[asyncio.Future[None]] = set()
        self._withheld: set[asyncio.TimerHandle] = set()

    async def enter(self) -> None:
        """Take a place, the right to use one connection; waits for it, first come, first served."""
        await self._places.acquire()

    def leave(self) -> None:
        """Give the place back."""
        self._places.release()

    def can_do_with_less(self) -> bool:
        """Whether other connections stand: an email that the server has no room for can wait for one of them."""
        return self._alive > 0 and len(self._withheld) < self._most_withheld

    def leave_for_later(self) -> None:
        """Give the place back in a while, because the server has enough of us."""
        timer: asyncio.TimerHandle = asyncio.get_running_loop().call_later(FULL_SECONDS, lambda: self._restore(timer))
        self._withheld.add(timer)

    def idle(self) -> SmtpConnection | None:
        """A kept connection that looks sound; None if there is none. The caller holds a place."""
        while self._idle:
            connection = self._idle.pop()
            if connection.conversation.is_sound:
                age = asyncio.get_running_loop().time() - connection.idle_since
                connection.needs_reset = connection.needs_reset or age >= self._trusted_idle_seconds
                return connection
            connection.conversation.abort()
        return None

    async def open(self) -> SmtpConnection:
        """A new connection. The caller holds a place.

        Raises:
            NotConnected, ProviderFault: as `open_connection` has it.
        """
        connection = await self._open_one()
        self._alive += 1
        connection.conversation.closed.add_done_callback(self._forget)
        return connection

    def give_back(self, connection: SmtpConnection) -> None:
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
        for timer in tuple(self._withheld):
            timer.cancel()
            self._restore(timer)
        while self._idle:
            self._say_goodbye(self._idle.pop())
        if self._leaving:
            await asyncio.wait(set(self._leaving), timeout=2 * GOODBYE_SECONDS)

    def _restore(self, timer: asyncio.TimerHandle) -> None:
        self._withheld.discard(timer)
        self._places.release()

    def _forget(self, _closed: asyncio.Future[None]) -> None:
        self._alive -= 1

    def _say_goodbye(self, connection: SmtpConnection) -> None:
        connection.conversation.quit()
        closed = connection.conversation.closed
        self._leaving.add(closed)
        closed.add_done_callback(self._leaving.discard)
