"""The web server for status pages: no client can block it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import pytest
from structlog.testing import capture_logs

from dispatcher.config.values import Listener
from dispatcher.host.web_server import CONNECTIONS, HEAD_OCTETS, Page, WebResponse, WebServer
from tests.waiting import until, until_answer

LOOPBACK = Listener("127.0.0.1", 0)


async def page() -> WebResponse:
    return WebResponse(b"hello\n")


async def failing_page() -> WebResponse:
    raise LookupError("ann@example.org")


@asynccontextmanager
async def serving(
    listener: Listener = LOOPBACK, *, request_seconds: float = 30.0, pages: Mapping[str, Page] = {}
) -> AsyncIterator[WebServer]:
    pages = {"/page": page, "/failing": failing_page, **pages}
    server = WebServer(listener, pages, request_seconds=request_seconds, retry_seconds=0.02)
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def connect(server: WebServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    await until(lambda: server.address is not None)
    assert server.address is not None
    return await asyncio.open_connection(server.address.host, server.address.port)


async def ask(server: WebServer, octets: bytes) -> bytes:
    """Sends these bytes; returns all bytes until the server closes the connection."""
    reader, writer = await connect(server)
    writer.write(octets)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


async def answers(server: WebServer, expected: HTTPStatus = HTTPStatus.OK) -> bool:
    return status(await ask(server, get("/page"))) == expected


def get(path: str, method: str = "GET", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize(("method", "body"), [("GET", b"hello\n"), ("HEAD", b"")])
async def test_a_page_is_served_whole_and_the_connection_ends(method: str, body: bytes) -> None:
    async with serving() as server:
        reply = await ask(server, get("/page?what=ever", method))

    assert status(reply) == HTTPStatus.OK
    assert b"Content-Length: 6\r\n" in reply
    assert reply.endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize(
    ("request_octets", "expected"),
    [
        (get("/nowhere"), HTTPStatus.NOT_FOUND),
        (get("/../page"), HTTPStatus.NOT_FOUND),
        (get("/page", "POST", "Content-Length: 0"), HTTPStatus.METHOD_NOT_ALLOWED),
        (get("/page", "DELETE"), HTTPStatus.METHOD_NOT_ALLOWED),
        (get("/page", "GET", "Content-Length: 3") + b"abc", HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        (get("/page", "GET", "Transfer-Encoding: chunked"), HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /page\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /page HTTP/1.1\r\nX: " + b"x" * (HEAD_OCTETS + 1), 431),
    ],
)
async def test_invalid_requests_get_an_error_response(request_octets: bytes, expected: int) -> None:
    async with serving() as server:
        assert status(await ask(server, request_octets)) == expected
        assert await answers(server)


async def test_a_slow_request_is_ended_at_the_deadline() -> None:
    async with serving(request_seconds=0.1) as server:
        reader, writer = await connect(server)
        replied = asyncio.create_task(reader.read())
        while not replied.done():
            writer.write(b"G")
            await asyncio.wait([replied], timeout=0.01)
        writer.close()

    assert status(await replied) == HTTPStatus.REQUEST_TIMEOUT


async def test_health_is_answered_while_idle_connections_are_open() -> None:
    async with serving() as server:
        idle = [await connect(server) for _ in range(3 * CONNECTIONS)]
        for _, writer in idle:
            writer.write(b"GET /page HTTP/1.1\r\nX-Slow: ")

        for _ in range(2 * CONNECTIONS):
            assert await answers(server)

        for reader, _ in idle[:CONNECTIONS]:
            assert await reader.read() == b""  # the oldest connection was closed
        for _, writer in idle:
            writer.close()


async def test_requests_that_are_being_answered_keep_their_slots() -> None:
    answer_now = asyncio.Event()

    async def slow_page() -> WebResponse:
        await answer_now.wait()
        return WebResponse(b"late\n")

    async with serving(pages={"/slow": slow_page}) as server:
        asking = [asyncio.create_task(ask(server, get("/slow"))) for _ in range(CONNECTIONS)]
        await until_answer(lambda: answers(server, HTTPStatus.SERVICE_UNAVAILABLE))

        answer_now.set()

        assert {status(reply) for reply in await asyncio.gather(*asking)} == {HTTPStatus.OK}
        assert await until_answer(lambda: answers(server))


async def test_a_failing_page_ends_one_request_and_reveals_nothing_private() -> None:
    async with serving() as server:
        with capture_logs() as logs:
            reply = await ask(server, get("/failing"))

        assert status(reply) == HTTPStatus.INTERNAL_SERVER_ERROR
        assert await answers(server)
    assert b"ann" not in reply
    assert [event["error"] for event in logs if event["event"] == "error.unexpected"] == ["LookupError"]
    assert "ann@example.org" not in str(logs)


async def test_an_address_in_use_is_reported_and_retried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as logs:
        async with serving(Listener("127.0.0.1", taken.getsockname()[1])) as server:
            await until(lambda: len(logs) >= 2)
            taken.close()
            assert await answers(server)

    assert logs[0]["event"] == "http.bind_failed"
    assert "DISPATCHER_METRICS_ADDRESS" in logs[0]["remedy"]
