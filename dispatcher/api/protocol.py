"""HTTP/1.1 with a deadline: uvicorn waits for a slow client as long as it likes, and reads a head of any size.

A client that drips its request keeps a connection, not a place: after some seconds for the head, or some more for the
whole request, it gets 408 and the connection ends. So does one that does not fetch its answer, or sends many requests
ahead of the answers.

The parser leaves two holes. Headers after a chunked body (trailers) have no bound and join those of the head, where an
`Authorization` would count; and a request that asks for another protocol ends its parsing, so that its body is read as
the next request. Both are refused, and the connection ends. So does whatever a proxy might frame in another way than we
do: no `Host` or two, chunks in HTTP/1.0, a coding beside the chunks.
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

MOST_HEAD_BYTES: Final = 32 * 1024
"""Octets before a request is whole that belong to no body: method, path and headers, or what is between two chunks of a
body and after the last. The longest key, list of parameters and trace have some kilobytes."""
LEAST_BODY_BYTES_PER_SECOND: Final = 1024
"""What a body must bring as long as it is not whole."""
LINGER_SECONDS: Final = 3.0
"""How long the connection stays open for a client that is still sending a refused request."""
MOST_SMALL_CHUNKS: Final = 4096
LEAST_CHUNK_BYTES: Final = 64
"""The average that a body's chunks must reach after `MOST_SMALL_CHUNKS`: each chunk costs us as much as a header."""
MOST_PIPELINED: Final = 16
"""Requests that wait for the answer to the one before, on one connection. Clients send none ahead; one that sends
thousands, and does not even read, would keep the process at parsing them."""
MOST_AHEAD_PER_TURN: Final = 16
"""Requests of all connections that are started per turn of the loop because the one before them was answered."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take.

    Attributes:
        head_seconds: From its first octet, or from connecting, to the end of the head. The rate of a body is checked
            at the same interval.
        request_seconds: From the first octet of a request to the last.
        answer_seconds: How long an answer may wait to be fetched.
    """

    head_seconds: float
    request_seconds: float
    answer_seconds: float = 10.0


class AheadQueue:
    """Requests that were sent ahead of answers: a few start per turn of the loop, so that others are served between."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, start: Callable[[], None]) -> None:
        """Has a request start soon."""
        self._waiting.append(start)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        for _ in range(min(MOST_AHEAD_PER_TURN, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._start)


class PatientProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self, *arguments: Any, patience: Patience, ahead: AheadQueue, on_refusal: Callable[[str], None], **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._patience = patience
        self._ahead = ahead
        self._on_refusal = on_refusal
        self._deadline: TimerHandle | None = None
        self._answer_deadline: TimerHandle | None = None
        self._loose_bytes = 0  # since the request began, or since its body last grew
        self._is_in_head = True
        self._body_bytes = 0  # since the rate was looked at last
        self._small_chunks_left = 0
        self._whole_until = 0.0
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._trailers = _Trailers(self._reject)

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """A client is there, and has not said anything."""
        self._lingering = _LingeringTransport(transport, self._has_unread_request)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        if self.client is None:
            # The client has reset the connection already. What it sent is not worth parsing.
            transport.abort()
            return
        self._expect(self._patience.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._lingering.end()
        self._expect(None)
        self._drop_unanswered()
        self.resume_writing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn forgets this timer where the client reset the connection
        # Nothing may refer to this object now, so that its memory is free without a look by the garbage collector.
        self.pipeline.clear()
        self.headers = []
        del self._trailers, self.cycle

    def data_received(self, data: bytes) -> None:
        """It said something."""
        if self._lingering.is_closing():
            return
        self._loose_bytes += len(data)  # the callbacks set it back
        if self._loose_bytes > MOST_HEAD_BYTES and self._is_in_head and self._has_endless_head(data):
            self._refuse("headers-too-large")
            return
        super().data_received(data)
        if self._loose_bytes > MOST_HEAD_BYTES:
            self._refuse("headers-too-large")
        elif self._deadline is None and self._is_in_head and not self._unanswered:
            self._expect(self._patience.head_seconds)  # empty lines have ended the wait for the next request

    def _has_unread_request(self) -> bool:
        return not self._is_in_head or self._loose_bytes > 0

    def _has_endless_head(self, data: bytes) -> bool:
        # A head and the beginning of a large body may come as one.
        end = data.find(b"\r\n\r\n")
        return end < 0 or self._loose_bytes - len(data) + end > MOST_HEAD_BYTES

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= MOST_PIPELINED:
            self._on_refusal("overloaded")
            self.transport.abort()  # an answer now would be taken for that of an earlier request
            raise ConnectionAbortedError  # for the parser, which would go on with what it has
        super().on_message_begin()
        self._is_in_head = True
        self._expect(self._patience.head_seconds)

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        if self.parser.should_upgrade():
            self._reject("The connection changes to no other protocol: have the client speak HTTP/1.1 alone.")
        self._check_framing()
        self._loose_bytes = 0
        self._is_in_head = False
        self._small_chunks_left = MOST_SMALL_CHUNKS
        self._whole_until = self.loop.time() + self._patience.request_seconds
        self._expect_body()
        super().on_headers_complete()
        self.headers = self._trailers  # until the next request begins
        self._unanswered.append(self.cycle)

    def _check_framing(self) -> None:
        """Refuses what a proxy before us may read in another way, or take for another host's."""
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if version not in ("1.1", "1.0"):
            self._reject("The version must be HTTP/1.1 or HTTP/1.0.")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            self._reject("The header Host must be there once.")
        if b"transfer-encoding" in names and (
            version == "1.0" or dict(self.headers)[b"transfer-encoding"].lower() != b"chunked"
        ):
            self._reject("A body comes with its Content-Length, or in HTTP/1.1 as chunks without another coding.")

    def on_chunk_header(self) -> None:
        """Another chunk of the body begins; refuses a body in too many small ones."""
        self._small_chunks_left -= 1
        if self._small_chunks_left < 0:
            self._reject(f"The chunks of a body must have {LEAST_CHUNK_BYTES} octets on average.")

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._loose_bytes = 0
        self._small_chunks_left += len(body) // LEAST_CHUNK_BYTES
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It is complete."""
        self._expect(None)
        self._is_in_head = True
        self._loose_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It was answered."""
        self._unanswered.popleft()
        if self.pipeline:
            self._ahead.add(super().on_response_complete)
        else:
            super().on_response_complete()

    def pause_writing(self) -> None:
        """Its answer waits to be fetched."""
        super().pause_writing()
        self._answer_deadline = self.loop.call_later(self._patience.answer_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It was fetched."""
        if self._answer_deadline is not None:
            self._answer_deadline.cancel()
            self._answer_deadline = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """What came is not HTTP."""
        self._refuse("malformed-request")

    def _expect(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._time_is_up)

    def _expect_body(self) -> None:
        self._body_bytes = 0
        self._expect(min(self._patience.head_seconds, self._whole_until - self.loop.time()))

    def _comes_fast_enough(self) -> bool:
        least = LEAST_BODY_BYTES_PER_SECOND * self._patience.head_seconds
        # Where we ourselves have paused the reading, the client is not to blame.
        return self.loop.time() < self._whole_until and (self._body_bytes >= least or self.flow.read_paused)

    def _time_is_up(self) -> None:
        if not self._is_in_head and self._comes_fast_enough():
            self._expect_body()
        elif self.cycle is None and self._loose_bytes == 0:
            self.transport.close()  # it connected, and asked for nothing
        else:
            self._refuse("request-timeout")

    def _reject(self, detail: str) -> NoReturn:
        """Refuses a request from within the parser."""
        self._refuse("malformed-request", detail)
        raise ConnectionAbortedError  # for the parser, which would go on with what it has

    def _refuse(self, code: str, detail: str | None = None) -> None:
        """Ends the connection, with a problem unless the client would take it for the answer to another request."""
        self._expect(None)
        if self.transport.is_closing():
            return
        self._on_refusal(code)
        if self._is_in_head:
            may_answer = not self._unanswered
        else:
            may_answer = len(self._unanswered) == 1 and not self._unanswered[0].response_started
        if may_answer:
            self.transport.write(_bare_answer(Problem(code, detail)))
        self._drop_unanswered()
        self.transport.close()

    def _drop_unanswered(self) -> None:
        # uvicorn knows the last of them alone; an earlier one would write to what is closed.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()


class _Trailers(list[tuple[bytes, bytes]]):
    """Where headers go that come after a body."""

    def __init__(self, reject: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._reject = reject

    def append(self, _: tuple[bytes, bytes]) -> NoReturn:
        self._reject("Headers after the body are not read.")


class _LingeringTransport:
    """A transport that closes in two steps if the client may still be sending: first our direction, later the client's.

    Closing both at once would make the kernel reset the connection, and the client could lose our answer.
    """

    def __init__(self, transport: Transport, has_unread_request: Callable[[], bool]) -> None:
        self._transport = transport
        self.write = transport.write
        self._has_unread_request = has_unread_request
        self._end: TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether `close` was called: nothing more may be written, and what arrives is ignored."""
        return self._end is not None or self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection once everything is written; lingers if the request is not read to its end."""
        if self.is_closing():
            return
        if not self._has_unread_request():
            self._transport.close()
            return
        self._end = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def end(self) -> None:
        """Stops the timer, and lets go of the protocol; the connection is closed."""
        self._has_unread_request = _nothing_is_unread
        if self._end is not None:
            self._end.cancel()


def _nothing_is_unread() -> bool:
    return False


def _bare_answer(problem: Problem) -> bytes:
    body = orjson.dumps(problem.document())
    head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[problem.status] + head.encode() + body
