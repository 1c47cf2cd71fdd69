"""The commands and replies of one SMTP connection, from the greeting on; detects a server that is out of step.

A reply counts only if its command was sent first. After one surplus reply, every later reply would answer the wrong
command, and a surplus `250` before the final dot would count as the answer to the email. So callers `check` before
every write, and `hear` before each step that they cannot undo.
"""

from __future__ import annotations

import asyncio
import re
import select
import ssl
from collections import deque
from typing import Final, cast

from dispatcher.transport.smtp_replies import SmtpReply, reply_of

MAX_REPLY_OCTETS: Final = 64 * 1024
"""A reply line has 512 octets (RFC 5321, section 4.5.3.1.5) and a reply few lines; more is no SMTP server."""
GOODBYE_SECONDS: Final = 2.0
"""How long a server may take to close after QUIT."""

_LINE: Final = re.compile(rb"([2-5][0-9][0-9])(?:([ -])(.*))?", re.DOTALL)


class ConnectionBroke(Exception):
    """The connection ended, or cannot be believed any more; the text says how, without any of the server's words."""


class GarbledReply(ConnectionBroke):
    """The server sent what is no SMTP reply."""


class OutOfStep(GarbledReply):
    """The server sent a reply to no command."""

    def __init__(self) -> None:
        super().__init__("the server sent a reply before it was asked")


class ServerClosing(ConnectionBroke):
    """The server closed the connection with 421 before the email left.

    Attributes:
        reply: The reply 421.
    """

    def __init__(self, reply: SmtpReply) -> None:
        super().__init__("the server is closing the connection")
        self.reply = reply


class Conversation(asyncio.Protocol):
    """One connection's replies in the order of their commands.

    Not for two tasks at once.

    Attributes:
        closed: Done when the connection has ended.
    """

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = select.poll()
        self._buffer = b""
        self._partial: list[re.Match[bytes]] = []
        self._partial_octets = 0
        self._replies: deque[SmtpReply] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._owed = 1  # the greeting
        self._fault: ConnectionBroke | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_sound(self) -> bool:
        """Whether the connection is open, no reply is outstanding, and no surplus reply has arrived, read or unread."""
        return (
            self._fault is None
            and not self._owed
            and not self._has_words
            and not self._transport.is_closing()
            and not self._socket.poll(0)
        )

    @property
    def address(self) -> str:
        """The local address."""
        found = self._transport.get_extra_info("sockname")
        return str(found[0]).partition("%")[0] if found else "127.0.0.1"

    @property
    def is_listening(self) -> bool:
        """Whether the server is there, and has not replied yet."""
        return self._fault is None and not self._replies and not self._transport.is_closing()

    def write(self, data: bytes, replies: int) -> None:
        """Hand bytes to the connection; the server owes so many replies for them. Nothing, once it has ended."""
        self._owed += replies
        # uvloop raises RuntimeError where asyncio ignores; either way, the next `reply` tells what happened.
        if data and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def owes(self) -> int:
        """How many replies the server owes us."""
        return self._owed

    def check(self) -> None:
        """Return if we may write: the connection is open, and every reply has been taken.

        Raises:
            ConnectionBroke: the connection is closed, or a reply was not taken.
        """
        if self._fault is not None:
            raise self._fault
        if self._transport.is_closing():
            raise ConnectionBroke("the connection was lost")
        if self._has_words:
            raise ServerClosing(self._replies[0]) if self._replies and self._replies[0].closes else OutOfStep()

    async def hear(self) -> None:
        """Read what has arrived, so that `check` and `contradicts` can judge it."""
        if not self._transport.is_closing() and self._socket.poll(0):
            # Two turns of the loop: the read may be scheduled only in the first one.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def contradicts(self, reply: SmtpReply) -> bool:
        """Whether another reply of a different class follows this one. 421 may follow any reply."""
        return any(other.code // 100 != reply.code // 100 and not other.closes for other in self._replies)

    async def secure(self, context: ssl.SSLContext, host: str) -> None:
        """Start TLS.

        Raises:
            ConnectionBroke: more unencrypted replies arrived, from the server or an attacker (RFC 3207, section 6).
            OSError: the handshake failed.
        """
        await self.hear()
        self.check()
        transport = await self._loop.start_tls(self._transport, self, context, server_hostname=host)
        if transport is None:
            raise ConnectionBroke("the connection was lost")
        self._transport = transport

    async def reply(self, patience: float | None = None) -> SmtpReply:
        """The next reply.

        Args:
            patience: Seconds after which the connection counts as broken; None to wait for ever.

        Raises:
            ConnectionBroke: there will be none.
        """
        if self._replies:
            return self._take()
        if self._fault is not None:
            raise self._fault
        self._waiter = self._loop.create_future()
        timer = None
        if patience is not None:
            timer = self._loop.call_later(patience, self._break, ConnectionBroke("the server did not answer"))
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        if not self._replies and self._fault is not None:
            raise self._fault
        return self._take()

    def reply_at_hand(self) -> SmtpReply | None:
        """The next reply if it has come already; for whoever was just told to stop waiting."""
        return self._take() if self._replies else None

    async def written(self) -> None:
        """Return when the system has taken every byte, or the server has replied, or the connection has broken."""
        # A server that reads as fast as we write never fills the buffer, and other emails wait for the loop.
        await asyncio.sleep(0)
        if self._transport.is_closing():
            return
        # The system's own buffer is behind this limit; asyncio's default would count 64 KB as written that are not.
        self._transport.set_write_buffer_limits(high=0)
        try:
            while self._is_writing():
                self._writable = self._loop.create_future()
                await self._writable
        finally:
            self._writable = None
            if not self._transport.is_closing():
                self._transport.set_write_buffer_limits()

    def abort(self) -> None:
        """End the connection at once, unsent bytes discarded. Again is harmless."""
        self._break(ConnectionBroke("we ended the connection"))
        self._transport.abort()

    def quit(self) -> None:
        """Say goodbye, and end the connection when the server does, or soon; `closed` tells."""
        if self._transport.is_closing() or self._fault is not None:
            self._transport.abort()
            return
        self._transport.write(b"QUIT\r\n")
        timer = self._loop.call_later(GOODBYE_SECONDS, self._transport.abort)
        self.closed.add_done_callback(lambda _: timer.cancel())
        # From here on the server owes us nothing that we would read.
        self._fault = ConnectionBroke("we ended the connection")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the open connection (asyncio calls this)."""
        self._transport = cast(asyncio.Transport, transport)
        self._socket.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        """Cut what came into replies (asyncio calls this)."""
        if self._fault is not None:
            return
        buffer = self._buffer + data
        *lines, self._buffer = buffer.split(b"\n")
        for line in lines:
            self._take_line(line.removesuffix(b"\r"))
            if self._fault is not None:
                break
        if len(self._buffer) + self._partial_octets > MAX_REPLY_OCTETS:
            self._break(GarbledReply("the server sent a reply without end"))
        if self._fault is not None:
            self._transport.abort()
        if self._replies or self._fault is not None:
            self._wake()

    def eof_received(self) -> None:
        """Note that the server said its last word (asyncio calls this); returning None closes the transport."""
        self._break(ConnectionBroke("the server closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end (asyncio calls this)."""
        words = f"the connection was lost: {type(exc).__name__}" if exc else "the server closed the connection"
        self._break(ConnectionBroke(words))
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Nothing: whoever writes much awaits `written` (asyncio calls this)."""

    def resume_writing(self) -> None:
        """Wake `written` (asyncio calls this)."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _is_writing(self) -> bool:
        return self.is_listening and self._transport.get_write_buffer_size() > 0

    @property
    def _has_words(self) -> bool:
        return bool(self._replies or self._partial or self._buffer)

    def _take(self) -> SmtpReply:
        self._owed -= 1
        return self._replies.popleft()

    def _take_line(self, line: bytes) -> None:
        parsed = _LINE.fullmatch(line)
        if parsed is None or (self._partial and parsed[1] != self._partial[0][1]):
            self._break(GarbledReply("the server sent a line that is no reply"))
            return
        self._partial.append(parsed)
        self._partial_octets += len(line)
        if parsed[2] != b"-":
            self._replies.append(_reply(self._partial))
            self._partial, self._partial_octets = [], 0
            # The first surplus reply is kept for `contradicts`; more of them end the connection.
            if len(self._replies) > self._owed + 1:
                self._break(OutOfStep())

    def _break(self, fault: ConnectionBroke) -> None:
        if self._fault is None:
            self._fault = fault
        self._wake()

    def _wake(self) -> None:
        for future in (self._waiter, self._writable):
            if future is not None and not future.done():
                future.set_result(None)


def _reply(lines: list[re.Match[bytes]]) -> SmtpReply:
    text = b"\n".join(line[3] or b"" for line in lines).decode("utf-8", "replace")
    return reply_of(int(lines[0][1]), text)
