"""The pool of connections that one worker keeps open to one SMTP server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from dispatcher.transport.call import NoFreeConnection
from dispatcher.transport.smtp_connection import SmtpConnection
from dispatcher.transport.smtp_protocol import QUIT_SECONDS

TRUSTED_IDLE_SECONDS: Final = 5.0
"""A connection that was idle for longer is tested with RSET before the next email, because servers and firewalls drop
idle connections silently."""
FIRST_CONNECTIONS: Final = 8
"""The pool begins with at most this many. Each further connection that the server accepts allows one more."""
FULL_SECONDS: Final = 30.0
"""After the server has refused a connection, the pool has one less, and does not grow, for this time."""


class ConnectionPool:
    """A limited number of connections, and fewer while the server takes fewer. Acquire a slot (the right to use one
    connection) before you take a connection:

            await pool.acquire_slot(deadline)
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
        first = min(connections, FIRST_CONNECTIONS)
        self._slots = asyncio.Semaphore(first)
        self._withheld = connections - first
        self._max_withheld = connections - 1
        self._full_timer: asyncio.TimerHandle | None = None
        self._emails_per_connection = emails_per_connection
        self._trusted_idle_seconds = trusted_idle_seconds
        self._idle: deque[SmtpConnection] = deque()
        self._open_count = 0
        self._closing: set[asyncio.Future[None]] = set()

    async def acquire_slot(self, deadline: float) -> None:
        """Acquires a slot, in order of arrival. Raises NoFreeConnection at the deadline (the loop's `time()`)."""
        if not self._slots.locked():
            await self._slots.acquire()  # returns at once; a timeout would take longer than the rest of the call
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise NoFreeConnection from None

    def release_slot(self) -> None:
        self._slots.release()

    def can_wait_for_another(self) -> bool:
        """Whether an email for which the server refused a new connection can wait until an open connection is free."""
        return self._open_count > 0 and self._withheld < self._max_withheld

    def withhold_slot(self) -> None:
        """Call this instead of `release_slot` if the server has refused the connection because we have too many."""
        self._withheld += 1
        if self._full_timer is not None:
            self._full_timer.cancel()
        self._full_timer = asyncio.get_running_loop().call_later(FULL_SECONDS, self._grow)

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
        if self._full_timer is None:
            self._grow()
        return connection

    def put_back(self, connection: SmtpConnection) -> None:
        """Keeps a connection for the next email. Closes it if it is not sound, or has carried its maximum of emails."""
        if not connection.protocol.is_sound:
            connection.protocol.abort()
        elif connection.emails >= self._emails_per_connection:
            self._quit(connection)
        else:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)

    async def close(self) -> None:
        """Closes every idle connection, and waits until they are closed. Idempotent."""
        if self._full_timer is not None:
            self._full_timer.cancel()
        while self._idle:
            self._quit(self._idle.pop())
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=2 * QUIT_SECONDS)

    def _grow(self) -> None:
        """Allows one more connection, unless all are allowed already."""
        self._full_timer = None
        if self._withheld:
            self._withheld -= 1
            self._slots.release()

    def _on_closed(self, _closed: asyncio.Future[None]) -> None:
        self._open_count -= 1

    def _quit(self, connection: SmtpConnection) -> None:
        connection.protocol.quit()
        closed = connection.protocol.closed
        self._closing.add(closed)
        closed.add_done_callback(self._closing.discard)
