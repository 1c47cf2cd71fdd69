"""uvicorn's HTTP/1.1 protocol with timeouts, size limits and strict framing.

uvicorn itself waits for slow clients without limit, and reads request heads of any size. Here a client that sends too
slowly gets 408, and its connection is closed. Connections of clients that do not read their responses, or pipeline many
requests, are closed too.

uvicorn's parser has two weaknesses. First, it appends headers that follow a chunked body (trailers) to the request's
headers, without a limit, so an `Authorization` trailer would be valid. Second, it stops parsing after a request for a
different protocol, so the request's body would be parsed as the next request. This module refuses both kinds of
requests with 400 and closes the connection. It also refuses each request that a proxy might read differently: with no
`Host` header or several, with chunks in HTTP/1.0, or with a transfer coding except `chunked`.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dispatcher.api.problems import MEDIA_TYPE, Problem

MAX_HEAD_BYTES: Final = 32 * 1024
"""The most bytes outside a body: of a request line with its headers, between two chunks of a body, or after the last
chunk. A request with the longest valid key, parameters and trace context needs a few kilobytes."""
MIN_BODY_BYTES_PER_SECOND: Final = 1024
"""The slowest rate at which a client may send a body."""
LINGER_SECONDS: Final = 3.0
"""How long the connection stays open for a client that is still sending a refused request."""
MAX_SMALL_CHUNKS: Final = 4096
MIN_CHUNK_BYTES: Final = 64
"""The average chunk size that a body must have if it has more than `MAX_SMALL_CHUNKS` chunks. Parsing a chunk takes as
much CPU as parsing a header."""
MAX_PIPELINED: Final = 16
"""The most pipelined requests per connection. Most clients do not pipeline. A client that sends thousands of requests
and reads no response would keep the process busy with parsing."""
MAX_PIPELINED_STARTS_PER_ITERATION: Final = 16
"""How many pipelined requests start per iteration of the event loop, on all connections together."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a client may take to send a request, and to read the response.

    Attributes:
        head_seconds: The longest time from the start of the connection to the end of the first request's headers. For
            a later request, the time begins with the request's first byte. Also the interval at which the rate of a
            body is checked.
        request_seconds: The longest time from the end of the headers to the end of the body.
        response_seconds: How long a client may leave a response unread.
    """

    head_seconds: float
    request_seconds: float
    response_seconds: float = 10.0


class PipelineQueue:
    """The pipelined requests of all connections that have not started yet.

    A few requests start per iteration of the event loop, so that other connections are served in between.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, start: Callable[[], None]) -> None:
        """Queues a request. The queue later calls `start`, which starts the request."""
        self._waiting.append(start)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        for _ in range(min(MAX_PIPELINED_STARTS_PER_ITERATION, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._start)


class StrictHttpProtocol(HttpToolsProtocol):
    """One client connection with timeouts, size limits and strict framing."""

    def __init__(
        self,
        *arguments: Any,
        timeouts: Timeouts,
        pipeline_queue: PipelineQueue,
        on_refusal: Callable[[str], None],
        static_paths: tuple[bytes, ...] = (),
        **named: Any,
    ) -> None:
        """
        Args:
            static_paths: Beginnings of the paths whose responses browsers may cache. Other responses get the default
                headers, which forbid caching.
        """
        super().__init__(*arguments, **named)
        self._timeouts = timeouts
        self._pipeline_queue = pipeline_queue
        self._on_refusal = on_refusal
        self._static_paths = static_paths
        self._timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        # Bytes that arrived after the parser last reported a complete head, a piece of a body, or the end of a request.
        self._overhead_bytes = 0
        self._is_in_head = True
        self._body_bytes = 0  # bytes of the body that arrived since its rate was last checked
        self._small_chunks_left = 0
        self._request_deadline = 0.0
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._trailers = _RejectedTrailers(self._reject)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Starts the timer for the first request."""
        self._lingering = _LingeringTransport(transport, self._has_unread_request)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        if self.client is None:
            # The client has already reset the connection: parsing its request would waste CPU.
            transport.abort()
            return
        self._set_timer(self._timeouts.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers, and drops all references, so that the memory is freed immediately."""
        self._lingering.end()
        self._set_timer(None)
        self._abandon_unanswered()
        self.resume_writing()
        super().connection_lost(exc)
        # Stop uvicorn's keep-alive timer: if the client has reset the connection, uvicorn leaves the timer running.
        self._unset_keepalive_if_required()
        # The next lines break reference cycles, so that the memory is freed without the garbage collector.
        self.pipeline.clear()
        self.headers = []
        del self._trailers, self.cycle

    def data_received(self, data: bytes) -> None:
        """Passes input to the parser, and refuses a request whose head is too large."""
        if self._lingering.is_closing():
            return
        # Count all bytes here. When the parser finds the end of a head, or a piece of a body, its callback sets the
        # count back to 0.
        self._overhead_bytes += len(data)
        if self._overhead_bytes > MAX_HEAD_BYTES and self._is_in_head and self._has_endless_head(data):
            self._refuse("headers-too-large", f"The limit is {MAX_HEAD_BYTES:,} bytes.")
            return
        super().data_received(data)
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self._refuse("headers-too-large", f"The limit is {MAX_HEAD_BYTES:,} bytes.")
        elif self._timer is None and self._is_in_head and not self._unanswered:
            # The client has sent only empty lines, and uvicorn has cancelled its keep-alive timer. So start a timer
            # here: without a timer, the client could keep the connection for ever.
            self._set_timer(self._timeouts.head_seconds)

    def _has_unread_request(self) -> bool:
        return not self._is_in_head or self._overhead_bytes > 0

    def _has_endless_head(self, data: bytes) -> bool:
        # One read can contain a head and the beginning of a large body. Only the bytes of the head count here.
        end = data.find(b"\r\n\r\n")
        return end < 0 or self._overhead_bytes - len(data) + end > MAX_HEAD_BYTES

    def on_message_begin(self) -> None:
        """Starts the timer for the headers. Aborts the connection if the client pipelines too many requests."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._on_refusal("overloaded")
            # No problem document is sent: the client would read it as the response to an earlier request.
            self.transport.abort()
            raise ConnectionAbortedError  # stops the parser, which would continue with buffered input
        super().on_message_begin()
        self._is_in_head = True
        self._set_timer(self._timeouts.head_seconds)

    def on_headers_complete(self) -> None:
        """Refuses Upgrade, CONNECT and ambiguous framing, and starts the timer for the body."""
        if self.parser.should_upgrade():
            self._reject("This API does not support Upgrade and CONNECT. Configure the client for plain HTTP/1.1.")
        self._check_framing()
        self._overhead_bytes = 0
        self._is_in_head = False
        self._small_chunks_left = MAX_SMALL_CHUNKS
        self._request_deadline = self.loop.time() + self._timeouts.request_seconds
        self._set_body_timer()
        super().on_headers_complete()
        if self._static_paths and self.url.startswith(self._static_paths):
            self.cycle.default_headers = []
        # A header that arrives after the body (a trailer) would be appended to this list, which refuses it.
        self.headers = self._trailers
        self._unanswered.append(self.cycle)

    def _check_framing(self) -> None:
        """Refuses a request that a proxy in front of the API might read differently.

        Checks the HTTP version, the Host header and the transfer coding.
        """
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if version not in ("1.1", "1.0"):
            self._reject("The HTTP version must be 1.1 or 1.0.")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            self._reject("The request must have one Host header.")
        if b"transfer-encoding" in names and (
            version == "1.0" or dict(self.headers)[b"transfer-encoding"].lower() != b"chunked"
        ):
            self._reject(
                "Send a Content-Length header. HTTP/1.1 also allows Transfer-Encoding: chunked, without another coding."
            )

    def on_chunk_header(self) -> None:
        """Refuses a body of too many small chunks."""
        self._small_chunks_left -= 1
        if self._small_chunks_left < 0:
            self._reject(f"Send the body in larger chunks: at least {MIN_CHUNK_BYTES} bytes on average.")

    def on_body(self, body: bytes) -> None:
        """Counts the body's bytes, and passes them to the application."""
        self._overhead_bytes = 0
        self._small_chunks_left += len(body) // MIN_CHUNK_BYTES
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stops the request's timer."""
        self._set_timer(None)
        self._is_in_head = True
        self._overhead_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Queues the start of the next pipelined request."""
        self._unanswered.popleft()
        if self.pipeline:
            self._pipeline_queue.add(super().on_response_complete)
        else:
            super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts a timer when the client stops reading a response. When the timer ends, the connection is aborted."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._timeouts.response_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the timer of `pause_writing`, because the client reads the response again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Refuses a request that the parser cannot parse."""
        self._refuse("malformed-request", "The request could not be parsed as HTTP/1.1.")

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._on_timeout)

    def _set_body_timer(self) -> None:
        self._body_bytes = 0
        self._set_timer(min(self._timeouts.head_seconds, self._request_deadline - self.loop.time()))

    def _is_fast_enough(self) -> bool:
        min_bytes = MIN_BODY_BYTES_PER_SECOND * self._timeouts.head_seconds
        # If this process has paused reading, the client does not count as slow.
        return self.loop.time() < self._request_deadline and (self._body_bytes >= min_bytes or self.flow.read_paused)

    def _on_timeout(self) -> None:
        if not self._is_in_head and self._is_fast_enough():
            self._set_body_timer()
        elif self.cycle is None and self._overhead_bytes == 0:
            self.transport.close()  # the connection is idle: no request has begun
        else:
            limits = (
                f"{self._timeouts.head_seconds:g} s for the headers, {self._timeouts.request_seconds:g} s for the body"
            )
            self._refuse(
                "request-timeout", f"Limits: {limits}. Send at least {MIN_BODY_BYTES_PER_SECOND:,} bytes per second."
            )

    def _reject(self, detail: str) -> NoReturn:
        """Refuses a request from within a callback of the parser, and stops the parser by an exception."""
        self._refuse("malformed-request", detail)
        raise ConnectionAbortedError  # stops the parser, which would continue with buffered input

    def _refuse(self, code: str, detail: str | None = None) -> None:
        """Sends a problem response and closes the connection.

        Sends no response if the client would read it as the response to a different request.
        """
        self._set_timer(None)
        if self.transport.is_closing():
            return
        self._on_refusal(code)
        if self._is_in_head:
            may_answer = not self._unanswered
        else:
            may_answer = len(self._unanswered) == 1 and not self._unanswered[0].response_started
        if may_answer:
            self.transport.write(_raw_response(Problem(code, detail)))
        self._abandon_unanswered()
        self.transport.close()

    def _abandon_unanswered(self) -> None:
        # Mark every unanswered request as disconnected. uvicorn marks only the last request. Without the mark, an
        # earlier request would write to the closed transport.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()


class _RejectedTrailers(list[tuple[bytes, bytes]]):
    """A header list that refuses every header.

    It replaces a request's header list when the headers are complete, so a header after the body (a trailer) is
    refused.
    """

    def __init__(self, reject: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._reject = reject

    def append(self, _: tuple[bytes, bytes]) -> NoReturn:
        self._reject("Headers after the body (trailers) are not supported.")


class _LingeringTransport:
    """A transport that closes in two steps (lingering close) if the client may still be sending.

    It first closes the sending direction, and aborts the connection after LINGER_SECONDS. If it closed both directions
    at the same time, the kernel would reset the connection, and the client could lose the response.
    """

    def __init__(self, transport: Transport, has_unread_request: Callable[[], bool]) -> None:
        self._transport = transport
        self.write = transport.write
        self._has_unread_request = has_unread_request
        self._end: TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether `close` was called. From then on, nothing more is written, and further input is ignored."""
        return self._end is not None or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection after all output is written.

        If part of the request has not been read, closes only the sending direction, and aborts the connection after
        LINGER_SECONDS.
        """
        if self.is_closing():
            return
        if not self._has_unread_request():
            self._transport.close()
            return
        self._end = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def end(self) -> None:
        """Cancels the linger timer, and drops the reference to the protocol. Called after the connection is closed."""
        self._has_unread_request = _nothing_is_unread
        if self._end is not None:
            self._end.cancel()


def _nothing_is_unread() -> bool:
    return False


def _raw_response(problem: Problem) -> bytes:
    body = orjson.dumps(problem.document())
    head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[problem.status] + head.encode() + body
