"""One kept HTTP/1.1 connection: one request at a time, and at every moment the truth about how far it is.

llhttp parses (by httptools). What is written is ours, so that nobody has to be asked whether something left: what was
not given to the connection never will.
"""

from __future__ import annotations

import asyncio
import math
import select
import ssl
from collections.abc import Callable, Iterable
from typing import Final, cast

import httptools

MAX_ANSWER_OCTETS: Final = 64 * 1024
"""Of an answer's body; SendGrid's longest list of errors is far below, and a hostile server fills no memory."""
MAX_HEAD_OCTETS: Final = 64 * 1024
"""Of an answer's headers."""
MAX_OCTETS: Final = 1024 * 1024
"""Of everything before an answer is whole: the frames of small chunks, trailers."""


class HttpConnection(asyncio.Protocol):
    """A connection; asyncio calls what `asyncio.Protocol` has, httptools what begins with `on_`.

    Attributes:
        is_open: Whether it stands.
        is_busy: Whether something of a request was written whose answer is not whole.
        idle_since: When it was last given back, in the loop's `time()`.
        status: The answer's; None before it.
        headers: The answer's, by their names in lower case; of one that came twice, the last.
        body: The answer's, its first `MAX_ANSWER_OCTETS`.
        fault: Why there will be no whole answer, as half a sentence; None while there may be one.
    """

    def __init__(self, on_end: Callable[[HttpConnection], None]) -> None:
        """
        Args:
            on_end: Told once, when a connection that stood has ended.
        """
        self.loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._is_paused = False
        self._octets = 0
        self._socket = select.poll()
        self.is_open = False
        self.is_busy = False
        self.idle_since = 0.0
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.fault: str | None = None

    @property
    def is_fit(self) -> bool:
        """Whether a request may be written: it stands, and nothing waits to be read, which could only be its end."""
        return self.stands and not self._socket.poll(0)

    @property
    def is_fit_at_first(self) -> bool:
        """The same of a new connection, where TLS may have something to read that is not its end."""
        return self.stands and not any(events & ~select.POLLIN for _, events in self._socket.poll(0))

    @property
    def stands(self) -> bool:
        """Whether what is written may still leave, as far as its transport knows."""
        # Of a connection that broke we are told a turn of the loop after its transport knows.
        return self.is_open and self._transport is not None and not self._transport.is_closing()

    def ask(self, octets: bytes) -> None:
        """Writes a request, or its beginning."""
        assert self._transport is not None
        self.is_busy = True
        self.status, self.headers, self.body = None, {}, b""
        self._octets = 0
        # Until somebody waits for the answer: what the timer is set for is an earlier deadline, and may come meanwhile.
        self._deadline = math.inf
        self._answered = self.loop.create_future()
        self._transport.write(octets)

    def go_on(self, octets: bytes) -> None:
        """Writes more of a request."""
        assert self._transport is not None
        self._transport.write(octets)

    async def go_on_slowly(self, pieces: Iterable[bytes]) -> None:
        """Writes more of a request, as the system takes it; returns once it has, or there is an answer or an end."""
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=1, low=0)
        for piece in pieces:
            if not (self.stands and self.is_busy):
                return
            self._transport.write(piece)
            if self._is_paused:
                self._drained = self.loop.create_future()
                await self._drained
            else:
                await asyncio.sleep(0)  # the system may take megabytes at once, and other emails wait for the loop

    def answered(self, deadline: float) -> asyncio.Future[None]:
        """Done once there is a whole answer, or a `fault`, or at the deadline, in the loop's `time()`."""
        assert self._answered is not None
        self._deadline = deadline
        # One timer sees to many requests: it is set anew where it fires before the deadline of the present one.
        if self._timer is None or deadline < self._timer_at:
            self._set_timer()
        return self._answered

    def end(self) -> None:
        """Drops it: what the system has not taken never leaves. A second call is harmless."""
        self._note_end()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands, TLS included."""
        self._transport = cast(asyncio.Transport, transport)
        self._socket.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Part of an answer; whoever speaks unasked is not listened to."""
        if not self.is_busy:
            self.end()
            return
        self._octets += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("what came is no HTTP")
        if self._octets > (MAX_HEAD_OCTETS if self.status is None else MAX_OCTETS):
            self._fail("it has no end")

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended, by whomever."""
        self._note_end()
        if self.is_busy and exc is None and self._ends_with_connection:
            self._complete()
        elif self.is_busy:
            self._fail(_words(exc))
        self.resume_writing()
        # Both know us: only the collector would take the circle apart, with TLS's buffers, perhaps an hour later.
        del self._parser
        self._transport = None

    def eof_received(self) -> None:
        """The other side says no more; `connection_lost` follows, over TLS much later."""
        self._note_end()

    def pause_writing(self) -> None:
        """The system takes no more for now."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The system has taken everything."""
        self._is_paused = False
        self._go_on_writing()

    def on_message_begin(self) -> None:
        """An answer; one that comes after the answer is nobody's, and so would be whatever comes after it."""
        if not self.is_busy:
            self.end()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if not self.is_busy:
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers, perhaps of an interim answer (RFC 9110, section 15.2), which says nothing."""
        status = self._parser.get_status_code()
        if not self.is_busy:
            return
        if status >= 200:
            self.status = status
        else:
            self.headers = {}

    def on_body(self, part: bytes) -> None:
        """Part of the body."""
        if not self.is_busy:
            return
        self.body += part[: MAX_ANSWER_OCTETS - len(self.body)]
        if len(self.body) == MAX_ANSWER_OCTETS:
            self._complete()
            self.end()

    def on_message_complete(self) -> None:
        """The whole answer."""
        if self.status is None or not self.is_busy:
            return
        assert self._transport is not None
        # Nor is it kept where the answer came before all had left: who knows what the server takes the rest for.
        if not self._parser.should_keep_alive() or self._transport.get_write_buffer_size():
            self.end()
        self._complete()

    @property
    def _ends_with_connection(self) -> bool:
        """Whether the answer has neither length nor chunks, so that the end is its end (RFC 9112, section 6.3)."""
        return self.status is not None and not self.headers.keys() & {"content-length", "transfer-encoding"}

    def _complete(self) -> None:
        self.is_busy = False
        self._settle()
        self._go_on_writing()

    def _fail(self, words: str) -> None:
        self.fault = self.fault or words
        self._settle()
        self.end()

    def _settle(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        self._timer = self.loop.call_at(self._deadline, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._answered is None or self._answered.done() or self._deadline == math.inf:
            return
        if self.loop.time() < self._deadline:
            self._set_timer()
        else:
            self._settle()

    def _go_on_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _note_end(self) -> None:
        if self.is_open:
            self.is_open = False
            self._on_end(self)
        if self._timer is not None and (self._answered is None or self._answered.done()):
            self._timer.cancel()
            self._timer = None


def _words(error: Exception | None) -> str:
    if error is None:
        return "the connection was closed"
    if isinstance(error, ConnectionError):
        return "the connection was reset"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    return f"the connection was lost ({type(error).__name__})"
