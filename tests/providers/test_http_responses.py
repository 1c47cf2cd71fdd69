"""If responses arrive early, late or unrequested, each call still gets its own response."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import pytest

from dispatcher.domain.outcome import Reason
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from tests.providers.attempts import FakeAttempt
from tests.providers.conftest import Authority

PATIENCE: Final = 20.0
ACCEPTED: Final = b"HTTP/1.1 202 Accepted\r\nX-Message-Id: %s\r\nContent-Length: 0\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def transport(authority: Authority) -> AsyncIterator[HttpTransport]:
    """A transport that trusts the tests' authority."""
    opened = HttpTransport(connections=8, ca_file=authority.ca_file)
    yield opened
    await opened.close()


@pytest.mark.parametrize("octets", [1, 8, 20, 60])
async def test_an_unrequested_response_is_not_taken_for_the_next_calls_response(
    octets: int, transport: HttpTransport
) -> None:
    """The server begins an unrequested response right after the first response. The server ends this response after it
    has read the next request."""
    unasked = ACCEPTED % b"unasked"
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        name = b"connection-%d" % len(connections)
        await _request(reader)
        writer.write(ACCEPTED % name + unasked[:octets])
        await _request(reader)
        writer.write(unasked[octets:])

    async with _server(serve) as url:
        ends = [await _post(transport, url) for _ in range(3)]

    assert [end.headers["x-message-id"] for end in ends if isinstance(end, HttpResponse)] == [
        "connection-1",
        "connection-2",
        "connection-3",
    ]


async def test_interim_responses_are_ignored(transport: HttpTransport) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3):
            await _request(reader)
            hints = b"HTTP/1.1 103 Early Hints\r\nX-Message-Id: hint\r\nLink: </a>\r\n\r\n"
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + hints + ACCEPTED % b"%d" % number)

    async with _server(serve) as url:
        ends = [await _post(transport, url) for _ in range(3)]

    assert [(end.status, end.headers) for end in ends if isinstance(end, HttpResponse)] == [
        (202, {"x-message-id": str(number), "content-length": "0"}) for number in range(3)
    ]


async def test_a_response_with_endless_trailers_is_given_up(transport: HttpTransport) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        while True:
            writer.write(b"Trailer: " + b"x" * 10_000 + b"\r\n")
            await writer.drain()

    async with _server(serve) as url:
        end = await _post(transport, url)

    assert isinstance(end, NoResponse)
    assert end.status == 202


async def test_a_response_to_half_a_large_body_counts_even_if_the_server_stops_reading(
    transport: HttpTransport,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}")

    async with _server(serve) as url:
        end = await _post(transport, url, b"x" * 20_000_000)

    assert isinstance(end, HttpResponse)
    assert (end.status, end.body) == (413, b"{}")


async def test_a_new_connection_closed_before_the_request_is_a_definite_failure(
    transport: HttpTransport, authority: Authority
) -> None:
    left: list[bool] = []
    async with _server(_closes_with_handshake(authority.server_of_tls_1_2)) as url:
        end = await _post(transport, url.replace("http:", "https:"), leaving=lambda: left.append(True))

    assert isinstance(end, RequestNotSent)
    assert end.reason is Reason.CONNECTION_FAILED
    assert not left


async def _post(
    transport: HttpTransport, url: str, body: bytes = b"{}", leaving: Callable[[], None] = lambda: None
) -> HttpResponse | RequestNotSent | NoResponse:
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    try:
        return await transport.post(url, {}, body, FakeAttempt(1, began_at + PATIENCE, leaving))
    except (RequestNotSent, NoResponse) as error:
        return error
    finally:
        assert loop.time() < began_at + PATIENCE / 2, "it waited for a response that could not arrive"


async def _request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.rpartition(b":")[2]))


def _closes_with_handshake(context: ssl.SSLContext) -> Serve:
    """Returns a handler that closes the connection in the same TCP segment that completes the handshake. In TLS 1.2,
    the server sends the last message of the handshake."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        while not _is_over(tls.do_handshake):
            writer.write(outgoing.read())
            incoming.write(await reader.read(65_536))
        _is_over(tls.unwrap)
        writer.write(outgoing.read())
        writer.write_eof()

    return serve


def _is_over(step: Callable[[], object]) -> bool:
    try:
        step()
    except ssl.SSLWantReadError:
        return False
    return True


@asynccontextmanager
async def _server(serve: Serve) -> AsyncIterator[str]:
    """Run a server that keeps its connections open until the end of the block; yields the URL."""
    over = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
            await over.wait()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v3/mail/send"
        over.set()
