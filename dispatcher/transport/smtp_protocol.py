"""The SMTP protocol on one connection, from the greeting on. Detects surplus replies: replies without a command.

A reply counts only if its command was sent first. After one surplus reply, every later reply would count for the wrong
command, and a surplus `250` before the final dot would count as acceptance of the email. So callers call `check` before
every write, and `read_available` before each step that they cannot undo.
"""

from __future__ import annotations

import asyncio
import re
import select
import ssl
from collections import deque
from typing import Final, cast

from dispatcher.domain.scrub import scrub
from dispatcher.transport.smtp_replies import SmtpReply, reply_of

MAX_REPLY_OCTETS: Final = 64 * 1024
"""The longest reply that we accept. A line of a reply has at most 512 octets (RFC 5321, section 4.5.3.1.5), and a reply
has few lines."""
QUIT_SECONDS: Final = 2.0
"""How long a server may take to close the connection after QUIT."""

_LINE: Final = re.compile(rb"([2-5][0-9][0-9])(?:([ -])(.*))?", re.DOTALL)


class SmtpConnectionLost(Exception):
    """The connection closed, or its replies can no longer be trusted. Contains no text that came after the greeting."""


class InvalidReply(SmtpConnectionLost):
    """The server sent something that is not an SMTP reply."""


class UnexpectedReply(InvalidReply):
    """The server sent a reply for which there was no command."""

    def __init__(self) -> None:
        super().__init__("the server sent a surplus reply")


class ServerClosing(SmtpConnectionLost):
    """The server closed the connection with `reply`, a 421, before the email was sent."""

    def __init__(self, reply: SmtpReply) -> None:
        super().__init__("the server is closing the connection")
        self.reply = reply


class SmtpProtocol(asyncio.Protocol):
    """Writes commands to one connection, and reads the replies in the order of the commands, for one task at a time.
    `closed`: a future that is done when the connection has closed."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = select.poll()
        self._buffer = b""
        self._partial: list[re.Match[bytes]] = []
        self._partial_octets = 0
        self._replies: deque[SmtpReply] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._outstanding = 1  # the greeting
        self._is_greeted = False
        self._fault: SmtpConnectionLost | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_sound(self) -> bool:
        """Whether the connection can be reused: open, no reply outstanding, and none unread, even in the socket."""
        return (
            self._fault is None
            and not self._outstanding
            and not self._has_unread
            and not self._transport.is_closing()
            and not self._socket.poll(0)
        )

    @property
    def address(self) -> str:
        found = self._transport.get_extra_info("sockname")
        return str(found[0]).partition("%")[0] if found else "127.0.0.1"

    @property
    def awaits_reply(self) -> bool:
        """Whether the connection is open, and no unread reply has arrived."""
        return self._fault is None and not self._replies and not self._transport.is_closing()

    def write(self, data: bytes, replies: int) -> None:
        """Writes bytes that the server must answer with this many replies. Sends nothing on a closed connection."""
        self._outstanding += replies
        # Do not write to a closed connection: asyncio would ignore the write, and uvloop would raise RuntimeError. The
        # next call of `reply` reports that the connection is closed.
        if data and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def check(self) -> None:
        """Raises SmtpConnectionLost if the connection is closed, or a reply is unread: the caller must not write."""
        if self._fault is not None:
            raise self._fault
        if self._transport.is_closing():
            raise SmtpConnectionLost("the connection was lost")
        if self._has_unread:
            raise ServerClosing(self._replies[0]) if self._replies and self._replies[0].closes else UnexpectedReply()

    async def read_available(self) -> None:
        """Lets the event loop read the replies that have arrived, so that `check` and `contradicts` consider them."""
        if not self._transport.is_closing() and self._socket.poll(0):
            # Wait two iterations of the loop, because the first iteration may only schedule the read.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def contradicts(self, reply: SmtpReply) -> bool:
        """Whether a later reply has another class (2xx, 4xx, 5xx). A 421 only announces that the server closes."""
        return any(other.code // 100 != reply.code // 100 and not other.closes for other in self._replies)

    async def start_tls(self, context: ssl.SSLContext, host: str) -> None:
        """Starts TLS. Raises OSError, or SmtpConnectionLost, also if an unencrypted reply arrived after the reply to
        STARTTLS, perhaps from an attacker (RFC 3207, section 6)."""
        await self.read_available()
        self.check()
        transport = await self._loop.start_tls(self._transport, self, context, server_hostname=host)
        if transport is None:
            raise SmtpConnectionLost("the connection was lost")
        self._transport = transport

    async def reply(self, timeout_seconds: float | None = None) -> SmtpReply:
        """The next reply. The connection counts as broken if none arrives within `timeout_seconds`."""
        if self._replies:
            return self._take()
        if self._fault is not None:
            raise self._fault
        self._waiter = self._loop.create_future()
        timer = None
        if timeout_seconds is not None:
            timer = self._loop.call_later(timeout_seconds, self._break, SmtpConnectionLost("the server did not answer"))
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        if not self._replies and self._fault is not None:
            raise self._fault
        return self._take()

    def received_reply(self) -> SmtpReply | None:
        """The next reply if it has already arrived, for a caller whose wait was cancelled."""
        return self._take() if self._replies else None

    async def flush(self) -> None:
        """Returns when the kernel has accepted every byte, a reply has arrived, or the connection has broken."""
        # Yield to the loop at least once: if the server reads as fast as we write, the buffer is always empty, and the
        # wait below never begins.
        await asyncio.sleep(0)
        if self._transport.is_closing():
            return
        # With asyncio's default limit, up to 64 KB in asyncio's buffer would count as written. With the limit 0, data
        # counts as written only when the kernel has accepted it.
        self._transport.set_write_buffer_limits(high=0)
        try:
            while self.awaits_reply and self._transport.get_write_buffer_size() > 0:
                self._flushed = self._loop.create_future()
                await self._flushed
        finally:
            self._flushed = None
            if not self._transport.is_closing():
                self._transport.set_write_buffer_limits()

    def abort(self) -> None:
        """Closes the connection immediately; unsent bytes are discarded. Idempotent."""
        self._break(SmtpConnectionLost("we closed the connection"))
        self._transport.abort()

    def quit(self) -> None:
        """Sends QUIT. The connection is `closed` when the server closes it, at the latest after QUIT_SECONDS."""
        if self._transport.is_closing() or self._fault is not None:
            self._transport.abort()
            return
        self._transport.write(b"QUIT\r\n")
        timer = self._loop.call_later(QUIT_SECONDS, self._transport.abort)
        self.closed.add_done_callback(lambda _: timer.cancel())
        # Because a fault is set, replies are ignored from now on.
        self._fault = SmtpConnectionLost("we closed the connection")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return
        buffer = self._buffer + data
        *lines, self._buffer = buffer.split(b"\n")
        for line in lines:
            self._take_line(line.removesuffix(b"\r"))
            if self._fault is not None:
                break
        if len(self._buffer) + self._partial_octets > MAX_REPLY_OCTETS:
            self._break(InvalidReply(f"the server sent a reply of more than {MAX_REPLY_OCTETS} octets"))
        if self._fault is not None:
            self._transport.abort()
        if self._replies or self._fault is not None:
            self._wake_waiters()

    def eof_received(self) -> None:
        self._break(SmtpConnectionLost("the server closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        words = f"the connection was lost: {type(exc).__name__}" if exc else "the server closed the connection"
        self._break(SmtpConnectionLost(words))
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Does nothing, because callers that write large bodies wait with `flush`. Called by asyncio."""

    def resume_writing(self) -> None:
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)

    @property
    def _has_unread(self) -> bool:
        return bool(self._replies or self._partial or self._buffer)

    def _take(self) -> SmtpReply:
        self._outstanding -= 1
        return self._replies.popleft()

    def _take_line(self, line: bytes) -> None:
        parsed = _LINE.fullmatch(line)
        # Some servers refuse a connection in the last line of a greeting, whose other lines have the code 220.
        is_mixed = self._partial and self._is_greeted and parsed and parsed[1] != self._partial[0][1]
        if parsed is None or is_mixed:
            # Nothing private was sent before the greeting, so its words can be shown.
            words = "" if self._is_greeted else f": {scrub(line.decode('utf-8', 'replace'))}"
            self._break(InvalidReply(f"the server sent a line that is not an SMTP reply{words}"))
            return
        self._partial.append(parsed)
        self._partial_octets += len(line)
        if parsed[2] != b"-":
            self._is_greeted = True
            self._replies.append(_reply(self._partial))
            self._partial, self._partial_octets = [], 0
            # Keep the first surplus reply, because `contradicts` needs it. A second surplus reply ends the connection.
            if len(self._replies) > self._outstanding + 1:
                self._break(UnexpectedReply())

    def _break(self, fault: SmtpConnectionLost) -> None:
        if self._fault is None:
            self._fault = fault
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        for future in (self._waiter, self._flushed):
            if future is not None and not future.done():
                future.set_result(None)


def _reply(lines: list[re.Match[bytes]]) -> SmtpReply:
    if len(lines) == 1:
        return reply_of(int(lines[0][1]), (lines[0][3] or b"").decode("utf-8", "replace"))
    text = b"\n".join(line[3] or b"" for line in lines).decode("utf-8", "replace")
    # The lines of a greeting can have different codes: the highest is a refusal, if there is one.
    return reply_of(max(int(line[1]) for line in lines), text)
