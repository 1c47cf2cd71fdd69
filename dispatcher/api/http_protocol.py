"""Guards uvicorn's HTTP/1.1 protocol: timeouts, size limits and strict framing.

uvicorn waits for slow clients without limit, reads request heads of any size, takes headers after a chunked body
(trailers) for headers of the request, and parses the body of a request for another protocol as the next request. So a
guard is between each connection and uvicorn. It parses the bytes first, and passes them on only if a proxy could not
read them differently. To the connection it is the protocol, and to uvicorn it is the connection. It uses only public
interfaces: asyncio's, httptools', and ASGI.
"""

from __future__ import annotations

import asyncio
import re
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from secrets import token_hex
from typing import Any, Final, NoReturn

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dispatcher.admission.problems import MEDIA_TYPE, Problem

MAX_HEAD_BYTES: Final = 32 * 1024
"""The most bytes outside a body: of a request line with its headers, between two chunks of a body, or after the last
chunk. A request with the longest valid key, parameters and trace context needs a few kilobytes."""
MIN_BODY_BYTES_PER_SECOND: Final = 1024
LINGER_SECONDS: Final = 3.0
"""How long the connection stays open for a client that is still sending a refused request."""
MAX_SMALL_PIECES: Final = 4096
MIN_PIECE_BYTES: Final = 64
"""The average size of a body's pieces if there are more than `MAX_SMALL_PIECES`. A piece is a chunk, or what arrived at
once. Parsing a piece takes as much CPU as parsing a header."""
MAX_PIPELINED: Final = 16
"""The most requests of a connection without a response. A client that sends thousands of requests and reads no response
would keep the process busy with parsing."""
PIPELINED_STARTS: Final = 8
"""How many pipelined requests, of all connections together, start per iteration of the event loop."""
LIMITS: Final = "dispatcher.limits"
"""The key of a request's scope under which a function may be that returns the headers with the caller's limits."""
_STEP_BYTES: Final = 16 * 1024
REQUEST_ID: Final = "dispatcher.request_id"
"""The key of a request's scope under which its id is."""
_TOKEN: Final = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")  # without @: an id is logged, and must not be an address
_CONNECTION: Final = "dispatcher.connection"
_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a client may take to send a request, and to read the response.

    Attributes:
        head_seconds: For the headers, from the start of the connection or the request's first byte. Also how long the
            beginning of a body may take; then the body must arrive at MIN_BODY_BYTES_PER_SECOND.
        request_seconds: The longest time from the end of the headers to the end of the body.
        response_seconds: How long a client may leave a response unread.
    """

    head_seconds: float
    request_seconds: float
    response_seconds: float = 10.0


class RequestIds:
    """Names requests: by their header X-Request-Id, or by a random number of this process and a counter."""

    def __init__(self) -> None:
        self._process = token_hex(8)
        self._count = count(1)

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The id of a request with these headers. An id of the client that is not a short token is replaced."""
        for name, value in headers:
            if name == b"x-request-id" and _TOKEN.fullmatch(value):
                return value
        return f"{self._process}-{next(self._count)}".encode()


class GuardedProtocol(asyncio.Protocol, asyncio.Transport):
    """One client connection. asyncio calls it as a protocol, and uvicorn's protocol calls it as a transport."""

    def __init__(
        self,
        *,
        timeouts: Timeouts,
        request_ids: RequestIds,
        on_refusal: Callable[[str], None],
        app_state: dict[str, Any],
        **named: Any,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeouts = timeouts
        self._request_ids = request_ids
        self._on_refusal = on_refusal
        self._http = HttpToolsProtocol(app_state={**app_state, _CONNECTION: self}, **named)
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's parser
        self._timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._is_lingering = False
        self._fault: Problem | None = None
        # Bytes that arrived after the parser last reported a complete head, a piece of a body, or the end of a request.
        self._overhead_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_in_head = True
        self._body_began_at = 0.0
        self._body_bytes = 0
        self._pieces = 0
        self._unanswered = 0  # requests whose head is complete
        self._is_answering = False
        self._is_head_next = False
        self._head = b""  # of a response. It is written with the beginning of the body, in one system call.

    # asyncio's protocol

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Starts the timer for the first request."""
        self._transport = transport
        self._http.connection_made(self)
        if transport.get_extra_info("peername") is None:
            # The client has already reset the connection: parsing and answering its request would waste CPU.
            transport.abort()
            return
        self._set_timer(self._timeouts.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Stops the timers, and drops the references, so that the memory is freed without the garbage collector."""
        self._set_timer(None)
        self.resume_writing()
        self._http.connection_lost(None)  # after an exception, uvicorn would leave its keep-alive timer running
        del self._http, self._parser

    def data_received(self, data: bytes) -> None:
        """Passes input to uvicorn, or refuses the request."""
        if self.is_closing():
            return
        try:
            start = 0
            while start < len(data):
                # When the parser finds the end of a head, or a piece of a body, its callback sets the count back to 0.
                if not (room := MAX_HEAD_BYTES - self._overhead_bytes):
                    self._refuse(Problem("headers-too-large", f"The limit is {MAX_HEAD_BYTES:,} bytes."))
                    return
                piece = data[start : start + min(_STEP_BYTES, room)]
                start += len(piece)
                self._overhead_bytes += len(piece)
                self._parser.feed_data(piece)
        except httptools.HttpParserError:
            unparsable = Problem("malformed-request", "The request could not be parsed as HTTP/1.1.")
            self._refuse(self._fault or unparsable)
            return
        if self._timer is None:
            if not self._is_in_head:
                self._set_timer(self._body_seconds_left())
            elif self._overhead_bytes:  # even if these are only empty lines: uvicorn stops its keep-alive timer
                self._set_timer(self._timeouts.head_seconds)
        self._http.data_received(data)

    def pause_writing(self) -> None:
        """Starts a timer when the client stops reading a response. When the timer ends, the connection is aborted."""
        self._http.pause_writing()
        self._write_timer = self._loop.call_later(self._timeouts.response_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        """Stops the timer of `pause_writing`, because the client reads the response again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._http.resume_writing()

    # uvicorn's transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """Writes a part of a response, unless the connection is closing. Then uvloop would raise an error."""
        if self._is_head_next:
            self._head, self._is_head_next = data, False
        elif not self.is_closing():
            self._transport.write(self._head + data)
            self._head = b""

    def is_closing(self) -> bool:
        """Whether `close` was called. From then on, nothing more is written, and further input is ignored."""
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection after all output is written.

        If part of a request has not arrived, closes only the sending direction, and aborts the connection after
        LINGER_SECONDS. If both directions were closed at the same time, the kernel would reset the connection, and the
        client could lose the response.
        """
        if self.is_closing():
            return
        self._write_head()
        if self._is_in_head and not self._overhead_bytes:
            self._transport.close()
            return
        self._is_lingering = True
        self._set_timer(LINGER_SECONDS)
        self._transport.write_eof()
        self._transport.resume_reading()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._overhead_bytes = self._overhead_bytes or 1  # a head that begins behind the end of another request

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            self._fail("Headers after the body (trailers) are not supported.")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Refuses Upgrade, CONNECT, and requests that a proxy in front of the API might read differently."""
        self._set_timer(None)
        self._is_in_head = False
        self._overhead_bytes = self._body_bytes = self._pieces = 0
        self._body_began_at = self._loop.time()
        self._unanswered += 1
        if self._unanswered > MAX_PIPELINED:
            self._fail(None, "overloaded")
        if self._parser.should_upgrade():
            self._fail("This API does not support Upgrade and CONNECT. Configure the client for plain HTTP/1.1.")
        try:  # as uvicorn, which would answer itself, and perhaps instead of an earlier request
            httptools.parse_url(self._url).path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            self._fail("The request line must have a path.")
        version = self._parser.get_http_version()
        names = [name for name, _ in self._headers]
        if version not in ("1.1", "1.0"):
            self._fail("The HTTP version must be 1.1 or 1.0.")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            self._fail("The request must have one Host header.")
        codings = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        if codings and (version == "1.0" or codings != [b"chunked"]):
            self._fail(
                "Send a Content-Length header. HTTP/1.1 also allows Transfer-Encoding: chunked, without another coding."
            )

    def on_body(self, body: bytes) -> None:
        """Counts the body's bytes. Refuses a body of too many small pieces."""
        self._overhead_bytes = 0
        self._body_bytes += len(body)
        self._pieces += 1
        if self._pieces > MAX_SMALL_PIECES + self._body_bytes // MIN_PIECE_BYTES:
            self._fail(f"Send the body in larger chunks: at least {MIN_PIECE_BYTES} bytes on average.")

    def on_message_complete(self) -> None:
        self._set_timer(None)
        self._is_in_head = True
        self._overhead_bytes = 0

    def _fail(self, detail: str | None, code: str = "malformed-request") -> NoReturn:
        """Stops the parser, so that `data_received` refuses the request."""
        self._fault = Problem(code, detail)
        raise ConnectionAbortedError

    # The application

    def begin_response(self) -> None:
        """From now on, the client would read a refusal as a part of the response."""
        self._is_answering = self._is_head_next = True

    def is_pipelining(self) -> bool:
        """Whether more requests have arrived than the one to which a response is due."""
        return self._unanswered > 1

    def end_response(self) -> None:
        self._is_head_next = False
        self._write_head()
        self._unanswered -= 1
        self._is_answering = False

    def _write_head(self) -> None:
        """Writes the head of a response whose body has not begun."""
        if self._head:
            self.write(b"")

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._on_timeout)

    def _body_seconds_left(self) -> float:
        allowed = self._timeouts.head_seconds + self._body_bytes / MIN_BODY_BYTES_PER_SECOND
        return self._body_began_at + min(allowed, self._timeouts.request_seconds) - self._loop.time()

    def _on_timeout(self) -> None:
        if self._is_lingering:
            self._transport.abort()
        elif self._is_in_head and not self._overhead_bytes:
            self._transport.close()  # the connection is idle: no request has begun
        elif not self._is_in_head and (seconds := self._body_seconds_left()) > 0:
            self._set_timer(seconds)
        else:
            head, body = self._timeouts.head_seconds, self._timeouts.request_seconds
            detail = f"Limits: {head:g} s for the headers, {body:g} s for the body. Send at least "
            self._refuse(Problem("request-timeout", f"{detail}{MIN_BODY_BYTES_PER_SECOND:,} bytes per second."))

    def _refuse(self, problem: Problem) -> None:
        """Sends a problem response and closes the connection.

        Sends no response if the client would read it as the response to a different request.
        """
        self._on_refusal(problem.code)
        if self._unanswered == (not self._is_in_head) and not self._is_answering:
            body = orjson.dumps(problem.document())
            status = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}"
            head = f"{status}\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            request_id = self._request_ids.of(self._headers)
            self._transport.write(head.encode() + b"x-request-id: " + request_id + b"\r\n\r\n" + body)
        self.close()


class GuardedApp:
    """An ASGI application that informs the connection when a response begins and ends, and adds headers to it."""

    def __init__(self, app: ASGIApp, request_ids: RequestIds, *, static_paths: tuple[bytes, ...] = ()) -> None:
        """
        Args:
            static_paths: Beginnings of the paths whose responses browsers may cache. Other responses get headers that
                forbid caching.
        """
        self._app = app
        self._request_ids = request_ids
        self._static_paths = static_paths
        self._pipelined_starts = asyncio.Semaphore(PIPELINED_STARTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: GuardedProtocol = scope["state"][_CONNECTION]
        request_id = scope[REQUEST_ID] = self._request_ids.of(scope["headers"])
        if connection.is_pipelining():
            async with self._pipelined_starts:
                await asyncio.sleep(0)  # the event loop serves other connections before the next requests start

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                connection.begin_response()
                headers = [(b"x-request-id", request_id), *message["headers"]]
                if limits := scope.get(LIMITS):
                    headers += limits()
                if not scope["raw_path"].startswith(self._static_paths):
                    headers += _HEADERS
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            connection.end_response()
