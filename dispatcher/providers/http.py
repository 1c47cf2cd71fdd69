"""The one way out to HTTP providers: kept TLS connections, exactly one POST per call, and the truth about how it ended.

    NothingLeft    a definite no: the body never left this process, and never will
    NoAnswer       the body left, and no whole answer came back: nobody can know
    Answer         whatever the server said, a 500 or a web page included

What tells the first two apart is not the client's exceptions (pyreqwest says "connection error" of one that closed
after the request), but the body itself: the client must ask for it, and does so only once it is connected. `leaving` is
called at that moment, on the loop. A call that has ended, by an exception, a deadline or a cancellation, hands no body
over: the client goes on in its own thread for a while, and would post what nobody waits for.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import DetailedPyreqwestError, PyreqwestError
from pyreqwest.request import RequestBuilder
from pyreqwest.response import Response

from dispatcher.domain.outcome import Reason
from dispatcher.providers.http_body import GuardedBody, latest_departure
from dispatcher.providers.scrub import scrub

MAX_ANSWER_OCTETS: Final = 64 * 1024
"""Of an answer's body; SendGrid's longest list of errors is far below, and a hostile server fills no memory."""
CONNECT_SECONDS: Final = 10.0
"""For the name, TCP and TLS; the call's own deadline may be sooner."""
IDLE_SECONDS: Final = 20.0
"""Kept connections are closed after so long without use. Servers do it after 60 or more, without asking: a request that
meets their goodbye half-way has left, and nobody can know whether it was read."""
GRACE_SECONDS: Final = 0.5
"""Beyond the deadline, for the client to say itself that it has passed; then we stop listening."""

_UNTRUSTED: Final = "invalid peer certificate"


class NothingLeft(Exception):
    """The body did not leave this process, and never will.

    Attributes:
        reason: `connection_failed` or `timeout_before_send`.
        detail: What was seen, scrubbed.
        is_untrusted: The server's certificate was refused; trying again changes nothing.
    """

    def __init__(self, reason: Reason, detail: str, *, is_untrusted: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.is_untrusted = is_untrusted


class NoAnswer(Exception):
    """The body may have left, and no whole answer came back.

    Attributes:
        detail: What was seen, scrubbed.
        status: Of an answer that broke off, or did not end in time; None if there was not even that.
    """

    def __init__(self, detail: str, *, status: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said.

    Attributes:
        headers: By their names in lower case; of one that came twice, the last.
        body: Its first `MAX_ANSWER_OCTETS`.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


class HttpTransport:
    """A pool of connections, for one process; for any number of calls at once on one loop.

    The client and its thread begin with the first call, which must come after the fork: they do not survive one.
    """

    def __init__(
        self, *, connections: int, ca_file: Path | None = None, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        """A transport that has connected to nobody, and started no thread.

        Args:
            connections: How many calls may be under way; the others wait.
            ca_file: Certificates to trust besides the system's, as PEM.

        Raises:
            ssl.SSLError, OSError: the CA file cannot be used.
        """
        self._places = asyncio.Semaphore(connections)
        certificates = _certificates(ca_file)
        self._build = partial(_client, connections, connect_seconds, certificates)
        self._client: Client | None = None

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, deadline: float, leaving: Callable[[], None]
    ) -> Answer:
        """The answer to one POST; never a second one, and no redirect is followed.

        Args:
            deadline: In the loop's `time()`; for everything, whatever the server drips.
            leaving: Called once, when a connection stands and nothing of the body has left, or of a large one all but
                its last octet. What it raises is raised here, and nothing leaves.

        Raises:
            NothingLeft, NoAnswer: see there.
        """
        latest = latest_departure(deadline)
        await self._wait_for_place(latest)
        guarded = GuardedBody(body, leaving, latest)
        try:
            request = _prepared(self._running().post(url), headers, deadline)
            request = request.header("Content-Length", str(len(body))).body_stream(guarded)
            return await _sent(request, deadline, guarded)
        finally:
            guarded.keep()
            self._places.release()

    async def get(self, url: str, headers: Mapping[str, str], deadline: float) -> Answer:
        """The answer to one GET, which changes nothing.

        Raises:
            NothingLeft: there was none.
        """
        await self._wait_for_place(deadline)
        nothing = GuardedBody(b"", lambda: None, deadline)
        try:
            return await _sent(_prepared(self._running().get(url), headers, deadline), deadline, nothing)
        finally:
            self._places.release()

    async def close(self) -> None:
        """End the connections; no call is under way. A second call is harmless."""
        if self._client is not None:
            await self._client.close()

    def _running(self) -> Client:
        if self._client is None:
            self._client = self._build()
        return self._client

    async def _wait_for_place(self, until: float) -> None:
        try:
            # A timeout costs ten times what a free place does.
            async with asyncio.timeout_at(until) if self._places.locked() else nullcontext():
                await self._places.acquire()
        except TimeoutError:
            raise NothingLeft(Reason.TIMEOUT_BEFORE_SEND, "the deadline passed before a connection was free") from None


def _client(connections: int, connect_seconds: float, certificates: list[bytes]) -> Client:
    builder = (
        ClientBuilder()
        # With HTTP/2, reqwest repeats a request that the server says it has not looked at.
        .http1_only()
        .follow_redirects(False)
        .referer(False)
        # A proxy would answer in the server's place, and say 502 of a request that arrived.
        .no_proxy()
        .gzip(False)
        .brotli(False)
        .zstd(False)
        .deflate(False)
        .connect_timeout(timedelta(seconds=connect_seconds))
        .pool_idle_timeout(timedelta(seconds=IDLE_SECONDS))
        .pool_max_idle_per_host(connections)
    )
    for certificate in certificates:
        builder = builder.add_root_certificate_der(certificate)
    return builder.build()


def _certificates(ca_file: Path | None) -> list[bytes]:
    if ca_file is None:
        return []
    # The client takes one certificate at a time, and reports a bad one only at the first connection.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=str(ca_file))
    return context.get_ca_certs(binary_form=True)


def _prepared(request: RequestBuilder, headers: Mapping[str, str], deadline: float) -> RequestBuilder:
    remaining = max(0.001, deadline - asyncio.get_running_loop().time())
    request = request.timeout(timedelta(seconds=remaining))
    for name, value in headers.items():
        # Whatever shows a request, a log or a repr, leaves the value out.
        request = request.header(name, value, is_sensitive=True)
    return request


async def _sent(request: RequestBuilder, deadline: float, body: GuardedBody) -> Answer:
    status: int | None = None
    try:
        # Without the limit it reads the body before it shows the status.
        streamed = request.streamed_read_buffer_limit(0).build_streamed()
        async with asyncio.timeout_at(deadline + GRACE_SECONDS), streamed as response:
            status = response.status
            return Answer(status, dict(response.headers.items()), await _beginning_of(response))
    except (PyreqwestError, TimeoutError, OSError) as error:
        if body.refusal is not None:
            raise body.refusal from None
        is_late = type(error) is TimeoutError or asyncio.get_running_loop().time() >= deadline
        raise _judged(error, status, body, is_late=is_late) from error


async def _beginning_of(response: Response) -> bytes:
    if response.get_header("content-length") == "0":
        return b""
    body = bytearray()
    while len(body) < MAX_ANSWER_OCTETS:
        chunk = await response.body_reader.read(MAX_ANSWER_OCTETS - len(body))
        if chunk is None:
            break
        body += chunk
    return bytes(body)


def _judged(error: Exception, status: int | None, body: GuardedBody, *, is_late: bool) -> NothingLeft | NoAnswer:
    words = _last_cause(error)
    if body.has_left or status is not None:
        detail = "no answer before the deadline" if is_late else f"no answer: {words}"
        if status is not None:
            detail = f"an answer with status {status} {'did not end in time' if is_late else f'broke off: {words}'}"
        return NoAnswer(detail, status=status)
    if is_late:
        what = "the body was not taken" if body.has_begun else "no connection"
        return NothingLeft(Reason.TIMEOUT_BEFORE_SEND, f"{what} in time for an answer before the deadline")
    what = "the connection broke before the body's end" if body.has_begun else "no connection"
    return NothingLeft(Reason.CONNECTION_FAILED, f"{what}: {words}", is_untrusted=words.startswith(_UNTRUSTED))


def _last_cause(error: Exception) -> str:
    """The innermost reason; the outer ones name our URL and the client's own parts."""
    causes = error.details["causes"] if isinstance(error, DetailedPyreqwestError) else None
    words = causes[-1]["message"] if causes else str(error) or type(error).__name__
    return scrub(words)
