"""The pool of connections that one worker keeps open to one SMTP server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from dispatcher.transport.smtp_connection import SmtpConnection
from dispatcher.transport.smtp_protocol import QUIT_SECONDS

TRUSTED_IDLE_SECONDS: Final = 5.0
"""A connection that was idle for longer is tested with RSET before the next email, because servers and firewalls drop
idle connections silently."""
FULL_SECONDS: Final = 30.0
"""After the server has refused a new connection, the pool has one connection less for this time."""


class ConnectionPool:
    """A limited number of connections. Acquire a slot (the right to use one connection) before you take a connection:

            await pool.acquire_slot()
            try:
                connection = pool.idle() or await pool.open()
                …
                pool.put_back(connection)
            finally:
                pool.release_slot()

    The connection that became idle last is reused first. So connections that are not needed stay idle until the server
    closes them.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[SmtpConnection]],
        *,
        connections: int,
        emails_per_connection: int,
        trusted_idle_seconds: float,
    ) -> None:
        self._connect = connect
        self._slots = asyncio.Semaphore(connections)
        self._max_withheld = connections - 1
        self._emails_per_connection = emails_per_connection
        self._trusted_idle_seconds = trusted_idle_seconds
        self._idle: deque[SmtpConnection] = deque()
        self._open_count = 0
        self._closing: set[asyncio.Future[None]] = set()
        self._withheld: set[asyncio.TimerHandle] = set()

    async def acquire_slot(self) -> None:
        """Acquires a slot: the right to use one connection. If no slot is free, waits in order of arrival."""
        await self._slots.acquire()

    def release_slot(self) -> None:
        """Releases a slot, so that another task can use a connection."""
        self._slots.release()

    def can_wait_for_another(self) -> bool:
        """Whether an email for which the server refused a new connection can wait until an open connection is free."""
        return self._open_count > 0 and len(self._withheld) < self._max_withheld

    def release_slot_later(self) -> None:
        """Releases a slot after FULL_SECONDS, because the server has refused a new connection. Until then, the pool has
        one connection less."""
        timer: asyncio.TimerHandle = asyncio.get_running_loop().call_later(FULL_SECONDS, lambda: self._restore(timer))
        self._withheld.add(timer)

    def idle(self) -> SmtpConnection | None:
        """An idle connection that seems usable; None if there is none. The caller must have acquired a slot."""
        while self._idle:
            connection = self._idle.pop()
            if connection.protocol.is_sound:
                age = asyncio.get_running_loop().time() - connection.idle_since
                connection.needs_reset = connection.needs_reset or age >= self._trusted_idle_seconds
                return connection
            connection.protocol.abort()
        return None

    async def open(self) -> SmtpConnection:
        """Opens a connection; the caller must have acquired a slot. Raises NotConnected and ProviderFault."""
        connection = await self._connect()
        self._open_count += 1
        connection.protocol.closed.add_done_callback(self._on_closed)
        return connection

    def put_back(self, connection: SmtpConnection) -> None:
        """Keeps a connection for the next email. Closes it instead if it is broken, if a reply is unread or missing, or
        if it has carried the maximum number of emails."""
        if not connection.protocol.is_sound:
            connection.protocol.abort()
        elif connection.emails >= self._emails_per_connection:
            self._quit(connection)
        else:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)

    async def close(self) -> None:
        """Closes every idle connection, and waits until they are closed. Idempotent."""
        for timer in tuple(self._withheld):
            timer.cancel()
            self._restore(timer)
        while self._idle:
            self._quit(self._idle.pop())
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=2 * QUIT_SECONDS)

    def _restore(self, timer: asyncio.TimerHandle) -> None:
        self._withheld.discard(timer)
        self._slots.release()

    def _on_closed(self, _closed: asyncio.Future[None]) -> None:
        self._open_count -= 1

    def _quit(self, connection: SmtpConnection) -> None:
        connection.protocol.quit()
        closed = connection.protocol.closed
        self._closing.add(closed)
        closed.add_done_callback(self._closing.discard)
