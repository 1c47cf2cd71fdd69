"""The HTTP client for providers: a pool of TLS connections, exactly one POST per call, and an exact result.

When a connection is open, the client calls `call.mark_on_wire`, and then writes the request. If the body is large, the
client first writes all octets except the last, then calls `call.mark_on_wire`, and then writes the last octet. Without
the last octet, the server cannot accept the request. So if the connection breaks after half of ten megabytes, the email
was definitely not sent.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from dispatcher.domain.outcome import Concern, Reason
from dispatcher.domain.scrub import scrub
from dispatcher.transport.body import Body
from dispatcher.transport.call import Call, NoFreeConnection
from dispatcher.transport.http_connection import HttpConnection
from dispatcher.transport.http_proxy import HttpProxy, ProxyRefused, open_tunnel
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.tcp import connect
from dispatcher.transport.tls import Tls, http_context
from dispatcher.transport.tls_faults import cause_of_tls

CONNECT_SECONDS: Final = 10.0
"""The limit for DNS, TCP and TLS together; the call's own deadline may be earlier."""
IDLE_SECONDS: Final = 20.0
"""We close connections that were idle for this long. Otherwise, the server would close them after 60 s or more, without
notice. If we sent a request just then, the outcome of the request would be unknown."""
LARGE_BODY_OCTETS: Final = 64 * 1024
"""If a body is larger, all its octets except the last are sent before `mark_on_wire`."""
RESPONSE_SHARE: Final = 0.25
"""The share of a call's time that is reserved for the response; at most MAX_RESPONSE_SECONDS."""
MAX_RESPONSE_SECONDS: Final = 1.0
"""The longest time that is reserved for a response. No request is sent within the reserved time, because its response
would probably arrive after the deadline."""
_MAX_HEADS: Final = 64

T = TypeVar("T")

Headers = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""A request's headers, or a function that returns them. The function is called when a connection is free, because some
headers contain a signature of the current time."""


class _Target(NamedTuple):
    """The parts of a URL that a request needs."""

    is_secure: bool
    host: str
    port: int
    authority: str
    path: str


class _Slots(asyncio.Semaphore):
    """A semaphore that can be taken without a coroutine, if `are_free`. A coroutine takes twenty times as long."""

    @property
    def are_free(self) -> bool:
        return self._value > 0 and not self._waiters

    def take(self) -> None:
        self._value -= 1


class HttpTransport:
    """A pool of connections to one server, for one event loop and any number of concurrent calls."""

    def __init__(
        self,
        *,
        connections: int,
        ca_file: Path | None = None,
        trusted: Path | None = None,
        proxy: HttpProxy | None = None,
        connect_seconds: float = CONNECT_SECONDS,
        context: ssl.SSLContext | None = None,
        connect: Callable[[str, int], Awaitable[socket.socket]] = connect,
        kind: type[HttpConnection] = HttpConnection,
    ) -> None:
        """`connections`: the most concurrent calls; further calls wait. `ca_file`: certificates to trust in addition to
        the system's; `trusted`: instead of the system's; `context`: instead of both. `connect` opens the sockets, for
        example only to checked addresses. `kind` has the limits of a response. Raises OSError if a certificate file
        cannot be used."""
        self._slots = _Slots(connections)
        self._connect_seconds = connect_seconds
        self._tls = context or http_context(ca_file, trusted)
        self._connect = connect
        self._kind = kind
        self._proxy = proxy
        # the open connections without a call; the connection that was used last is the last
        self.idle: list[HttpConnection] = []
        self._open: set[HttpConnection] = set()
        self._heads: dict[tuple[str, str], tuple[dict[str, str], bytes]] = {}
        self._idle_timer: asyncio.TimerHandle | None = None

    async def post(self, url: str, headers: Headers, body: bytes | Body, call: Call) -> HttpResponse:
        """Sends one POST and returns its response. Never retries, and never follows a redirect.

        Calls `call.connection_acquired` when a connection is free. Calls `call.mark_on_wire` when the connection is
        open, just before it writes the body (or the last octet of a large body). If one of these two methods raises an
        exception, `post` raises the same exception, and the server never gets a complete request. `call.deadline`
        limits the whole call, even if the server sends one octet at a time. Raises NoFreeConnection, RequestNotSent or
        NoResponse.
        """
        await self._acquire(call.deadline)
        try:
            call.connection_acquired()
            deadline = call.deadline
            send_by = _latest_send_at(deadline)
            head = self._head("POST", url, headers() if callable(headers) else headers)
            connection = self._idle_connection() or await self._new_connection(_target(url), send_by)
            try:
                return await _exchange(
                    connection, head + b"%d\r\n\r\n" % len(body), body, deadline, send_by, call.mark_on_wire
                )
            finally:
                self._put_back(connection)
        finally:
            self._slots.release()

    def begin(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Body,
        call: Call,
        answered: Callable[[HttpResponse | NoResponse], T],
    ) -> asyncio.Future[T] | None:
        """Like `post`, but writes the whole request before it returns, so that the call needs no task.

        Returns a future of what `answered` makes of the response. Do not cancel it. Returns None, and sends nothing, if
        no connection is idle, or if the body is large or in parts: then use `post`. If `call.mark_on_wire` raises an
        exception, `begin` raises the same exception, and the server gets nothing. Does not call
        `call.connection_acquired`, because the call does not wait for a connection.
        """
        if not isinstance(body, bytes) or len(body) > LARGE_BODY_OCTETS or not self._slots.are_free:
            return None
        head = self._head("POST", url, headers)
        if (connection := self._idle_connection()) is None:
            return None
        try:
            call.mark_on_wire()
        except BaseException:
            self.idle.append(connection)  # unused
            raise
        self._slots.take()
        try:
            connection.start_request(
                b"%b%d\r\n\r\n%b" % (head, len(body), body), partial(self._end, connection, answered)
            )
        except BaseException:
            connection.abort()  # when the connection has closed, it calls `_end`
            raise
        return connection.response_done(call.deadline)

    def _end(self, connection: HttpConnection, answered: Callable[[HttpResponse | NoResponse], T]) -> T:
        """Ends a call of `begin`: its connection and its slot become free."""
        try:
            return answered(_no_response(connection) if connection.is_busy else _response(connection))
        finally:
            self._put_back(connection)
            self._slots.release()

    async def get(self, url: str, headers: Mapping[str, str], deadline: float) -> HttpResponse:
        """Sends one GET and returns its response. Raises NoFreeConnection, RequestNotSent or NoResponse."""
        await self._acquire(deadline)
        try:
            connection = self._idle_connection() or await self._new_connection(_target(url), deadline)
            try:
                head = self._head("GET", url, headers) + b"0\r\n\r\n"
                return await _exchange(connection, head, b"", deadline, deadline, lambda: None)
            finally:
                self._put_back(connection)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Closes all connections. The caller makes sure that no call is in progress. Idempotent."""
        for connection in tuple(self._open):
            connection.abort()
        self.idle.clear()

    def _acquire(self, deadline: float) -> Awaitable[object]:
        # Set up a timeout only if no slot is free: the timeout costs ten times the CPU of acquiring a free slot.
        return self._acquire_in_time(deadline) if self._slots.locked() else self._slots.acquire()

    async def _acquire_in_time(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(_latest_send_at(deadline)):
                await self._slots.acquire()
        except TimeoutError:
            raise NoFreeConnection from None

    def _idle_connection(self) -> HttpConnection | None:
        """Takes the idle connection that was used last, because the server is least likely to have closed this one."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_reusable:
                return connection
            connection.abort()
        return None

    async def _new_connection(self, target: _Target, until: float) -> HttpConnection:
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + self._connect_seconds
        try:
            async with asyncio.timeout_at(min(until, gives_up_at)):
                connection = await self._connected(target)
        except TimeoutError:
            if until <= gives_up_at:
                raise _late("the connection did not open early enough for a response", Concern.PROVIDER) from None
            words = f"no connection: connecting took longer than {self._connect_seconds:g} s"
            raise RequestNotSent(Reason.CONNECTION_FAILED, words) from None
        except OSError as error:
            why = str(error) if isinstance(error, ProxyRefused) else error.strerror or "the connection was closed"
            words = cause_of_tls(error) if isinstance(error, ssl.SSLError) else why
            raise RequestNotSent(Reason.CONNECTION_FAILED, f"no connection: {scrub(words)}") from error
        if not connection.is_usable_when_new:
            connection.abort()
            raise RequestNotSent(Reason.CONNECTION_FAILED, "the server closed the connection right after the handshake")
        return connection

    async def _connected(self, target: _Target) -> HttpConnection:
        hop = self._proxy or target
        connected = await self._connect(hop.host, hop.port)
        if self._proxy is not None:
            await open_tunnel(self._proxy, connected, target.host, target.port)
        connection = self._kind(self._open.discard)
        if target.is_secure:
            tls = Tls(self._tls, connection, server_hostname=target.host)
            transport, _ = await connection.loop.create_connection(lambda: tls, sock=connected)
            try:
                await tls.handshake_done
            except BaseException:
                transport.abort()
                raise
        else:
            await connection.loop.create_connection(lambda: connection, sock=connected)
        # Do not add a connection that has already closed. Its `on_end` was already called, so nothing would remove the
        # connection from the set.
        if connection.is_open:
            self._open.add(connection)
        return connection

    def _put_back(self, connection: HttpConnection) -> None:
        if connection.is_busy:
            connection.abort()
        elif connection.is_open:
            connection.idle_since = connection.loop.time()
            self.idle.append(connection)
            if self._idle_timer is None:
                self._idle_timer = connection.loop.call_later(IDLE_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS
        old = [connection for connection in self.idle if connection.idle_since <= oldest]
        self.idle = [connection for connection in self.idle if connection.idle_since > oldest and connection.is_open]
        for connection in old:
            connection.abort()
        self._idle_timer = loop.call_at(self.idle[0].idle_since + IDLE_SECONDS, self._end_idle) if self.idle else None

    def _head(self, method: str, url: str, headers: Mapping[str, str]) -> bytes:
        """The request line and the headers, up to `Content-Length: `. The caller appends the length."""
        kept = self._heads.get((method, url))
        if kept is not None and kept[0] == headers:
            return kept[1]
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        head = _head(method, _target(url), headers)
        self._heads[method, url] = dict(headers), head
        return head


async def _exchange(
    connection: HttpConnection,
    head: bytes,
    body: bytes | Body,
    deadline: float,
    send_by: float,
    leaving: Callable[[], None],
) -> HttpResponse:
    if len(body) > LARGE_BODY_OCTETS:
        body, last = _split_last_octet(body)
        if response := await _write_all_but_last(connection, head, body, send_by):
            return response
        write, rest = connection.write_more, last
    else:
        write, rest = connection.start_request, head + bytes(body)
    if connection.loop.time() >= send_by:
        raise _late("the request could not be sent early enough for a response")
    leaving()
    write(rest)
    await connection.response_done(deadline)
    if not connection.is_busy:
        return _response(connection)
    raise _no_response(connection)


def _split_last_octet(body: bytes | Body) -> tuple[Body, bytes]:
    """Splits a body before its last octet. The last part of a body is `bytes`: text follows the last attachment."""
    *parts, end = body.parts if isinstance(body, Body) else (body,)
    assert isinstance(end, bytes)
    return Body((*parts, end[:-1])), end[-1:]


async def _write_all_but_last(
    connection: HttpConnection, head: bytes, most: Body, send_by: float
) -> HttpResponse | None:
    """Writes the request except its last octet. Returns the response if the server responds early, otherwise None."""
    connection.start_request(head)
    try:
        async with asyncio.timeout_at(send_by):
            await connection.write_pieces(most.pieces())
    except TimeoutError:
        raise _late("the server did not read the body early enough for a response") from None
    if not connection.is_busy:
        connection.abort()
        return _response(connection)
    if not connection.can_write:
        cause = connection.fault or "the connection was closed"
        words = f"the connection broke before the end of the body: {cause}"
        raise RequestNotSent(Reason.CONNECTION_FAILED, words, concern=Concern.EITHER)
    return None


def _response(connection: HttpConnection) -> HttpResponse:
    assert connection.status is not None
    return HttpResponse(connection.status, connection.headers, bytes(connection.body))


def _no_response(connection: HttpConnection) -> NoResponse:
    status, fault = connection.status, connection.fault
    if status is None:
        return NoResponse("no response before the deadline" if fault is None else f"no response: {fault}")
    how = "was incomplete at the deadline" if fault is None else f"was cut off: {fault}"
    return NoResponse(f"the response with status {status} {how}", status=status)


def _late(what: str, concern: Concern | None = None) -> RequestNotSent:
    return RequestNotSent(Reason.TIMEOUT_BEFORE_SEND, f"{what} before the deadline", concern=concern)


def _latest_send_at(deadline: float) -> float:
    """The latest time at which a body may be sent, so that enough time for the response remains."""
    share = (deadline - asyncio.get_running_loop().time()) * RESPONSE_SHARE
    return deadline - min(max(0.0, share), MAX_RESPONSE_SECONDS)


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
        raise ValueError("a header contains a line break")
    return ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1")
