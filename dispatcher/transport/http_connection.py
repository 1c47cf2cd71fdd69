"""One persistent HTTP/1.1 connection that handles one request at a time.

httptools (llhttp) parses responses. This module writes requests itself, so it is always certain what was sent: the
connection sends only octets that were passed to it.
"""

from __future__ import annotations

import asyncio
import math
import select
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import httptools

MAX_RESPONSE_OCTETS: Final = 64 * 1024
"""The maximum number of octets kept from a response body. SendGrid's longest error list is far shorter, and a hostile
server cannot fill the memory."""
MAX_HEAD_OCTETS: Final = 64 * 1024
"""The maximum size of a response's headers."""
MAX_OCTETS: Final = 1024 * 1024
"""The maximum size of a whole response, including chunk framing and trailers."""


class HttpConnection(asyncio.Protocol):
    """An HTTP connection. asyncio calls the methods of `asyncio.Protocol`; httptools calls the methods named `on_…`."""

    most_head_octets = MAX_HEAD_OCTETS
    most_body_octets = MAX_RESPONSE_OCTETS
    most_octets = MAX_OCTETS

    def __init__(self, on_end: Callable[[HttpConnection], None]) -> None:
        """`on_end`: called once, with this connection, when it has closed. Not called if it was never open."""
        self.loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Any] | None = None
        self._end: Callable[[], Any] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._is_paused = False
        self._octets = 0
        self._most_head, self._most_body, self._most = self.most_head_octets, self.most_body_octets, self.most_octets
        self._socket = select.poll()
        self.is_open = False
        self.is_busy = False  # whether a request was written, at least in part, and its response is not complete
        self.idle_since = 0.0  # when the connection was last returned to the pool, in the loop's `time()`
        self.status: int | None = None
        self.headers: dict[str, str] = {}  # by lower-case name; for a repeated header, the last value
        self.body: bytes | bytearray = b""  # at most the first MAX_RESPONSE_OCTETS
        self.fault: str | None = None  # why no complete response will arrive, as a clause

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be written. Unread input means that the server has closed the connection, or has
        sent data that belongs to no request."""
        return self.can_write and not self._socket.poll(0)

    @property
    def is_usable_when_new(self) -> bool:
        """Like `is_reusable`, for a new connection: a server can send TLS data (session tickets) after the
        handshake."""
        return self.can_write and not any(events & ~select.POLLIN for _, events in self._socket.poll(0))

    @property
    def can_write(self) -> bool:
        """Whether the connection can still send octets, as far as the asyncio transport knows."""
        # Check both: after the transport has begun to close, `is_open` stays true until asyncio calls
        # `connection_lost`, in the next iteration of the loop.
        return self.is_open and self._transport is not None and not self._transport.is_closing()

    def start_request(self, octets: bytes, end: Callable[[], Any] | None = None) -> None:
        """Writes a request, or its beginning. `end`: called when `response_done` is done, and returns its result."""
        assert self._transport is not None
        self.is_busy = True
        self.status, self.headers, self.body = None, {}, b""
        self._octets = 0
        self._end = end
        # The timer of an earlier request might still fire, and must not end this request. So this request has no
        # deadline until `response_done` sets it.
        self._deadline = math.inf
        self._done = self.loop.create_future()
        self._transport.write(octets)

    def write_more(self, octets: bytes) -> None:
        assert self._transport is not None
        self._transport.write(octets)

    async def write_pieces(self, pieces: Iterable[bytes]) -> None:
        """Writes more of a request, as fast as the kernel accepts it; stops at a response or at the end."""
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=1, low=0)
        for piece in pieces:
            if not (self.can_write and self.is_busy):
                return
            self._transport.write(piece)
            if self._is_paused:
                self._drained = self.loop.create_future()
                await self._drained
            else:
                # Yield to the loop. If the kernel accepts many pieces in a row, other emails would otherwise wait for
                # all of them.
                await asyncio.sleep(0)

    def response_done(self, deadline: float) -> asyncio.Future[Any]:
        """A future that is done when the response is complete, when `fault` is set, or at the deadline."""
        assert self._done is not None
        self._deadline = deadline
        # One timer serves many requests. If it fires before the deadline of the current request, it is set again.
        if self._timer is None or deadline < self._timer_at:
            self._set_timer()
        return self._done

    def abort(self) -> None:
        """Aborts the connection; octets that the kernel has not accepted are never sent. Idempotent."""
        self._set_closed()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Marks the connection as open. asyncio calls this; if the connection uses TLS, after the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._socket.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parses a part of a response. Closes the connection if no request is pending."""
        if not self.is_busy:
            self.abort()
            return
        self._octets += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("the server sent something that is not HTTP")
        if self.status is None:
            if self._octets > self._most_head:
                self._fail_head()
        elif self._octets > self._most:
            self._fail("the response is too long")

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_closed()
        # Without a length, the server ends the response by closing the connection (RFC 9112, section 6.3).
        has_length = bool(self.headers.keys() & {"content-length", "transfer-encoding"})
        if self.is_busy and exc is None and self.status is not None and not has_length:
            self._complete()
        elif self.is_busy:
            self._fail(_cause_of(exc))
        self.resume_writing()
        # The parser and the transport refer back to this object. If these references stay, the objects and TLS's
        # buffers stay in memory until the garbage collector runs, perhaps an hour later.
        del self._parser
        self._transport = None

    def eof_received(self) -> None:
        """The server will send no more. asyncio calls `connection_lost` later."""
        self._set_closed()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._resume_pieces()

    def on_message_begin(self) -> None:
        """Without a request, later responses could be assigned to the wrong requests."""
        if not self.is_busy:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_busy:
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Stores the status. Discards the headers of an interim response (RFC 9110, section 15.2)."""
        status = self._parser.get_status_code()
        if not self.is_busy:
            return
        if status >= 200:
            self.status = status
        else:
            self.headers = {}

    def on_body(self, part: bytes) -> None:
        if not self.is_busy:
            return
        if not self.body:
            self.body = bytearray()  # a server may send each octet alone, and `bytes` would be copied each time
        self.body += part[: self._most_body - len(self.body)]
        if len(self.body) == self._most_body:
            self.abort()
            self._complete()

    def on_message_complete(self) -> None:
        if self.status is None or not self.is_busy:
            return
        assert self._transport is not None
        # Also close the connection if the response came before the whole request was sent: the server might read the
        # remaining octets as a new request.
        if not self._parser.should_keep_alive() or self._transport.get_write_buffer_size():
            self.abort()
        self._complete()

    def _complete(self) -> None:
        self.is_busy = False
        self._set_done()
        self._resume_pieces()

    def _fail(self, words: str) -> None:
        self.fault = self.fault or words
        self._set_done()
        self.abort()

    def _fail_head(self) -> None:
        self._fail(f"the headers of the answer are longer than {self._most_head // 1024} KiB")

    def _set_done(self) -> None:
        done, end = self._done, self._end
        if done is None or done.done():
            return
        self._end = None
        try:
            result = None if end is None else end()
        except Exception as error:  # noqa: BLE001 - passed on to the caller that waits for the response
            done.set_exception(error)
        else:
            done.set_result(result)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        self._timer = self.loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._done is None or self._done.done() or self._deadline == math.inf:
            return
        if self.loop.time() < self._deadline:
            self._set_timer()
        else:
            self._set_done()

    def _resume_pieces(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _set_closed(self) -> None:
        if self.is_open:
            self.is_open = False
            self._on_end(self)
        if self._timer is not None and (self._done is None or self._done.done()):
            self._timer.cancel()
            self._timer = None


def _cause_of(error: Exception | None) -> str:
    if error is None:
        return "the connection was closed"
    if isinstance(error, ConnectionError):
        return "the connection was reset"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    return f"the connection was lost ({type(error).__name__})"
