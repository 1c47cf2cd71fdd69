"""A small web server for status pages. It uses asyncio for sockets, and h11 to parse requests.

The server has a few slots. Each connection occupies a slot for a few seconds at most, and serves one request without a
body. A request that is too large, too slow, or neither GET nor HEAD gets an error response. If all slots are occupied,
a new connection replaces the oldest connection that has not sent a whole request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final

import h11

from dispatcher.config.values import Listener
from dispatcher.domain.retry import Backoff
from dispatcher.domain.values import dataclass
from dispatcher.telemetry.log import get_log

CONNECTIONS: Final = 32
REQUEST_SECONDS: Final = 5.0
REPLY_SECONDS: Final = 10.0
LINGER_SECONDS: Final = 1.0
"""The longest wait for the client to close the connection."""
HEAD_OCTETS: Final = 8192
RETRY_SECONDS: Final = 2.0
LONGEST_RETRY_SECONDS: Final = 60.0
_READ_OCTETS: Final = 4096


@dataclass(frozen=True, slots=True)
class WebResponse:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Page = Callable[[], Awaitable[WebResponse]]


class WebServer:
    """Serves pages at an address. Retries while the address cannot be bound; `address` is None until then."""

    def __init__(
        self,
        listener: Listener,
        pages: Mapping[str, Page],
        *,
        setting: str = "DISPATCHER_METRICS_ADDRESS",
        shares_port: bool = False,
        request_seconds: float = REQUEST_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`setting` names the address's setting, for error messages. If `shares_port`, other processes of the same user
        may serve the same pages (SO_REUSEPORT)."""
        self.address: Listener | None = None
        self._listener = listener
        self._setting = setting
        self._shares_port = shares_port
        self._pages = pages
        self._request_seconds = request_seconds
        self._retry_seconds = retry_seconds
        self._log = get_log()
        self._open = 0
        self._reading: dict[asyncio.Task[object], None] = {}
        """Connections that have not sent a whole request, oldest first."""

    async def run(self) -> None:
        """Serves the pages until cancelled."""
        backoff = Backoff(self._retry_seconds, LONGEST_RETRY_SECONDS)
        while True:
            try:
                server = await asyncio.start_server(
                    self._serve,
                    self._listener.host,
                    self._listener.port,
                    limit=HEAD_OCTETS,
                    reuse_port=self._shares_port or None,
                )
            except (OSError, UnicodeError) as error:
                seconds = backoff.next_wait(lambda: 1.0)
                # Report only the end of asyncio's message: the system's text, such as "address already in use".
                words = getattr(error, "strerror", None) or str(error)
                self._log.error(
                    "http.bind_failed",
                    listener=str(self._listener),
                    reason=words.rpartition(": ")[2],
                    remedy=f"Set {self._setting} to a free address, or to off.",
                    retry_in_seconds=seconds,
                )
                await asyncio.sleep(seconds)
                continue
            host, port = server.sockets[0].getsockname()[:2]
            self.address = Listener(host, port)
            self._log.info("http.listening", listener=str(self.address))
            try:
                await server.serve_forever()
            finally:
                self.address = None
                server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Ignore these errors: they concern only this connection, and no code awaits this task.
        with suppress(OSError, TimeoutError, asyncio.CancelledError):
            oldest = next(iter(self._reading), None)
            is_busy = self._open >= CONNECTIONS and oldest is None
            if self._open >= CONNECTIONS and oldest is not None:
                del self._reading[oldest]
                oldest.cancel()
            self._open += 1
            try:
                await self._answer(reader, writer, is_busy=is_busy)
            finally:
                self._open -= 1
            # Wait until the client closes: if the server closed first, a TCP reset could destroy the response.
            async with asyncio.timeout(LINGER_SECONDS):
                while await reader.read(_READ_OCTETS):
                    pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_busy: bool) -> None:
        is_head = False
        if is_busy:
            answer = _plain(HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            try:
                request = await self._read(reader)
                if request is None:
                    return
                is_head = request.method == b"HEAD"
                answer = await self._page(request)
            except TimeoutError:
                answer = _plain(HTTPStatus.REQUEST_TIMEOUT)
            except h11.RemoteProtocolError as error:
                answer = _plain(HTTPStatus(error.error_status_hint))
        async with asyncio.timeout(REPLY_SECONDS):
            writer.write(_octets(answer, is_head=is_head))
            await writer.drain()
            writer.write_eof()

    async def _read(self, reader: asyncio.StreamReader) -> h11.Request | None:
        """Reads the head of a request; None if the client closed the connection before the end of the head."""
        task = asyncio.current_task()
        assert task is not None
        self._reading[task] = None
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_OCTETS)
        try:
            async with asyncio.timeout(self._request_seconds):
                while (event := connection.next_event()) is h11.NEED_DATA:
                    octets = await reader.read(_READ_OCTETS)
                    connection.receive_data(octets)
                    if not octets:
                        return None
        finally:
            self._reading.pop(task, None)
        return event if isinstance(event, h11.Request) else None

    async def _page(self, request: h11.Request) -> WebResponse:
        if request.method not in (b"GET", b"HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        headers = dict(request.headers)
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip() != b"0":
            return _plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        page = self._pages.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
        try:
            return await page() if page else _plain(HTTPStatus.NOT_FOUND)
        except Exception as error:  # noqa: BLE001 - a failing page must not end the server
            self._log.error("error.unexpected", where="web", error=type(error).__name__)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)


def _plain(status: HTTPStatus) -> WebResponse:
    return WebResponse(f"{status.value} {status.phrase}\n".encode(), status=status)


def _octets(answer: WebResponse, *, is_head: bool) -> bytes:
    """Encodes a response. Its headers say that the server then closes the connection."""
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "close"),
    ]
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET, HEAD"))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers)
    line = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
    return f"{line}{head}\r\n".encode() + (b"" if is_head else answer.body)
