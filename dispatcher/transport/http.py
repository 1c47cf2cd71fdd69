"""The one way out to HTTP providers: kept TLS connections, exactly one POST per call, and the truth about how it ended.

`leaving` is called when a connection stands and the body is about to be written to it. Of a large body all but the last
octet is written before: without it the server cannot accept, so that a connection which breaks half-way through ten
megabytes is a definite no.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from dispatcher.domain.outcome import Reason
from dispatcher.domain.scrub import scrub
from dispatcher.transport.body import Body
from dispatcher.transport.call import Call, NoPlace
from dispatcher.transport.http_answer import Answer, NoAnswer, NothingLeft
from dispatcher.transport.http_connection import HttpConnection
from dispatcher.transport.http_proxy import HttpProxy, ProxyRefused, open_tunnel
from dispatcher.transport.tls import Tls, client_context

CONNECT_SECONDS: Final = 10.0
"""For the name, TCP and TLS; the call's own deadline may be sooner."""
IDLE_SECONDS: Final = 20.0
"""Kept connections are closed after so long without use. Servers do it after 60 or more, without asking: a request that
meets their goodbye half-way has left, and nobody can know whether it was read."""
LARGE_BODY_OCTETS: Final = 64 * 1024
"""From here on a body leaves but for its last octet before `leaving` is called."""
ANSWERS_SHARE: Final = 0.25
MOST_FOR_ANSWER_SECONDS: Final = 1.0
"""Of a call's time so much is the answer's, at most a second: what could only leave in that time stays, for its answer
would hardly be met."""
FALLBACK_SECONDS: Final = 0.25
"""Until a host's next address is tried beside the one before (RFC 8305, section 5)."""
_MOST_HEADS: Final = 64

Headers = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""A request's headers, or what makes them once a connection is free: a signature carries its time."""


class _Target(NamedTuple):
    """Where a URL leads."""

    is_secure: bool
    host: str
    port: int
    authority: str
    path: str


class HttpTransport:
    """A pool of connections, for one process; for any number of calls at once on one loop.

    Every URL of one transport is at one server. Nothing is opened before the first call.
    """

    def __init__(
        self,
        *,
        connections: int,
        ca_file: Path | None = None,
        trusted: Path | None = None,
        proxy: HttpProxy | None = None,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """A transport that has connected to nobody.

        Args:
            connections: How many calls may be under way; the others wait.
            ca_file: Certificates to trust besides the system's, as PEM.
            trusted: Certificates to trust instead of the system's, as PEM.
            proxy: Every TLS connection goes through a tunnel that this proxy opens.

        Raises:
            ssl.SSLError, OSError: a file of certificates cannot be used.
        """
        self._places = asyncio.Semaphore(connections)
        self._connect_seconds = connect_seconds
        self._tls = _tls(ca_file, trusted)
        self._proxy = proxy
        self._idle: list[HttpConnection] = []
        self._open: set[HttpConnection] = set()
        self._heads: dict[tuple[str, str], tuple[dict[str, str], bytes]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def post(self, url: str, headers: Headers, body: bytes | Body, call: Call) -> Answer:
        """The answer to one POST; never a second one, and no redirect is followed.

        `call.admitted` is called once a connection is free for the call. `call.leaving` is called once a
        connection stands and nothing of the body has left, or of a large body all but its last octet. What they raise
        is raised here, and nothing leaves. `call.deadline` covers everything, whatever the server drips.

        Raises:
            NoPlace: no connection became free in time.
            NothingLeft, NoAnswer: see there.
        """
        await self._place(call.deadline)
        try:
            call.admitted()
            deadline = call.deadline
            latest = _latest_departure(deadline)
            head = self._head("POST", url, headers() if callable(headers) else headers)
            connection = self._kept() or await self._new(_target(url), latest)
            try:
                return await _exchange(
                    connection, head + b"%d\r\n\r\n" % len(body), body, deadline, latest, call.leaving
                )
            finally:
                self._give_back(connection)
        finally:
            self._places.release()

    async def get(self, url: str, headers: Mapping[str, str], deadline: float) -> Answer:
        """The answer to one GET, which changes nothing.

        Raises:
            NoPlace, NothingLeft, NoAnswer: there was none.
        """
        await self._place(deadline)
        try:
            connection = self._kept() or await self._new(_target(url), deadline)
            try:
                head = self._head("GET", url, headers) + b"0\r\n\r\n"
                return await _exchange(connection, head, b"", deadline, deadline, lambda: None)
            finally:
                self._give_back(connection)
        finally:
            self._places.release()

    async def close(self) -> None:
        """End the connections; no call is under way. A second call is harmless."""
        for connection in tuple(self._open):
            connection.end()
        self._idle.clear()

    def _place(self, deadline: float) -> Awaitable[object]:
        """Takes a place; to be awaited."""
        # A timeout costs ten times what a free place does.
        return self._wait_for_place(deadline) if self._places.locked() else self._places.acquire()

    async def _wait_for_place(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(_latest_departure(deadline)):
                await self._places.acquire()
        except TimeoutError:
            raise NoPlace from None

    def _kept(self) -> HttpConnection | None:
        """The connection that was used last, the least likely to have been closed; None if none is kept."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fit:
                return connection
            connection.end()
        return None

    async def _new(self, target: _Target, until: float) -> HttpConnection:
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + self._connect_seconds
        try:
            async with asyncio.timeout_at(min(until, gives_up_at)):
                connection = await self._connected(target)
        except TimeoutError:
            if until <= gives_up_at:
                raise _late("no connection") from None
            raise NothingLeft(Reason.CONNECTION_FAILED, "no connection: it took too long") from None
        except OSError as error:
            is_untrusted = isinstance(error, ssl.SSLCertVerificationError)
            words = scrub(_words(error))
            raise NothingLeft(Reason.CONNECTION_FAILED, f"no connection: {words}", is_untrusted=is_untrusted) from error
        if not connection.is_fit_at_first:
            connection.end()
            raise NothingLeft(Reason.CONNECTION_FAILED, "no connection: it was closed at once")
        return connection

    async def _connected(self, target: _Target) -> HttpConnection:
        loop = asyncio.get_running_loop()
        way = self._proxy or target
        addresses = await loop.getaddrinfo(way.host, way.port, type=socket.SOCK_STREAM)
        taken = await start_connection(addresses, happy_eyeballs_delay=FALLBACK_SECONDS, interleave=1)
        if self._proxy is not None:
            await open_tunnel(self._proxy, taken, target.host, target.port)
        connection = HttpConnection(self._open.discard)
        if target.is_secure:
            await self._secured(taken, connection, target.host)
        else:
            await loop.create_connection(lambda: connection, sock=taken)
        if connection.is_open:  # it may have ended in the same round: nobody would take it out again
            self._open.add(connection)
        return connection

    async def _secured(self, taken: socket.socket, connection: HttpConnection, host: str) -> None:
        tls = Tls(self._tls, connection, server_hostname=host)
        transport, _ = await connection.loop.create_connection(lambda: tls, sock=taken)
        try:
            await tls.stands
        except BaseException:
            transport.abort()
            raise

    def _give_back(self, connection: HttpConnection) -> None:
        """Keeps a connection for the next call, unless the last one's answer is not whole."""
        if connection.is_busy:
            connection.end()
        elif connection.is_open:
            connection.idle_since = connection.loop.time()
            self._idle.append(connection)
            if self._sweep is None:
                self._sweep = connection.loop.call_later(IDLE_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        """Ends what was not used for long; those that were used last are the last."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS
        old = [connection for connection in self._idle if connection.idle_since <= oldest]
        self._idle = [connection for connection in self._idle if connection.idle_since > oldest and connection.is_open]
        for connection in old:
            connection.end()
        self._sweep = loop.call_at(self._idle[0].idle_since + IDLE_SECONDS, self._end_idle) if self._idle else None

    def _head(self, method: str, url: str, headers: Mapping[str, str]) -> bytes:
        """A request's head up to the value of its last header, the length."""
        kept = self._heads.get((method, url))
        if kept is not None and kept[0] == headers:
            return kept[1]
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        head = _head(method, _target(url), headers)
        self._heads[method, url] = dict(headers), head
        return head


async def _exchange(
    connection: HttpConnection,
    head: bytes,
    body: bytes | Body,
    deadline: float,
    latest: float,
    leaving: Callable[[], None],
) -> Answer:
    if len(body) > LARGE_BODY_OCTETS:
        body, last = _cut(body)
        if answer := await _all_but_the_last(connection, head, body, latest):
            return answer
        write, rest = connection.go_on, last
    else:
        write, rest = connection.ask, head + bytes(body)
    if connection.loop.time() >= latest:
        raise _late("no connection")
    leaving()
    write(rest)
    await connection.answered(deadline)
    if not connection.is_busy:
        return _answer(connection)
    raise _no_answer(connection)


def _cut(body: bytes | Body) -> tuple[Body, bytes]:
    """All but the last octet, and that; the last part of a body is in clear."""
    *parts, end = body.parts if isinstance(body, Body) else (body,)
    assert isinstance(end, bytes)
    return Body((*parts, end[:-1])), end[-1:]


async def _all_but_the_last(connection: HttpConnection, head: bytes, most: Body, latest: float) -> Answer | None:
    """Writes the most of a request; the answer that a server may give before it has read everything."""
    connection.ask(head)
    try:
        async with asyncio.timeout_at(latest):
            await connection.go_on_slowly(most.pieces())
    except TimeoutError:
        raise _late("the body was not taken") from None
    if not connection.is_busy:
        connection.end()
        return _answer(connection)
    if not connection.stands:
        words = connection.fault or "the connection was closed"
        raise NothingLeft(Reason.CONNECTION_FAILED, f"the connection broke before the body's end: {words}")
    return None


def _answer(connection: HttpConnection) -> Answer:
    assert connection.status is not None
    return Answer(connection.status, connection.headers, connection.body)


def _no_answer(connection: HttpConnection) -> NoAnswer:
    status, fault = connection.status, connection.fault
    if status is None:
        return NoAnswer("no answer before the deadline" if fault is None else f"no answer: {fault}")
    how = "did not end in time" if fault is None else f"broke off: {fault}"
    return NoAnswer(f"an answer with status {status} {how}", status=status)


def _late(what: str) -> NothingLeft:
    return NothingLeft(Reason.TIMEOUT_BEFORE_SEND, f"{what} in time for an answer before the deadline")


def _latest_departure(deadline: float) -> float:
    """Until when a body may leave that is to be answered by the deadline; in the loop's `time()`."""
    share = (deadline - asyncio.get_running_loop().time()) * ANSWERS_SHARE
    if share >= MOST_FOR_ANSWER_SECONDS:  # as nearly always
        return deadline - MOST_FOR_ANSWER_SECONDS
    return deadline - max(0.0, share)


@lru_cache(maxsize=64)
def _target(url: str) -> _Target:
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    return _Target(is_secure, parts.hostname or "", parts.port or (443 if is_secure else 80), parts.netloc, path)


def _head(method: str, target: _Target, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target.path} HTTP/1.1", f"Host: {target.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header holds a line break")
    return ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1")


def _tls(ca_file: Path | None, trusted: Path | None) -> ssl.SSLContext:
    context = client_context(trusted)
    if ca_file is not None:
        context.load_verify_locations(cafile=str(ca_file))
    context.set_alpn_protocols(["http/1.1"])
    return context


def _words(error: OSError) -> str:
    if isinstance(error, ProxyRefused):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    if isinstance(error, socket.gaierror):
        return error.strerror or "the name is not known"
    return os.strerror(error.errno) if error.errno else "the connection was closed"
