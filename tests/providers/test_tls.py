"""TLS between our HTTP connection and the socket works for any split of the octets and any way to close the
connection."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import pytest

from dispatcher.domain.outcome import Reason
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_connection import HttpConnection
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from tests.providers.attempts import FakeAttempt
from tests.providers.conftest import Authority
from tests.waiting import until

PATIENCE: Final = 20.0
HEAD: Final = b"HTTP/1.1 200 OK\r\n"
BODY: Final = b"x" * 60_000
"""A body of four TLS records, below the limit for a response's body."""


@pytest.mark.parametrize("version", ["TLS 1.3", "TLS 1.2"])
@pytest.mark.parametrize(
    ("answer", "cut_into", "body"),
    [
        (HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, 100_000, BODY),
        (HEAD + b"Content-Length: 2\r\n\r\nok", 1, b"ok"),
        (HEAD + b"\r\nok", 100, b"ok"),
    ],
    ids=["several records", "octet by octet", "until the end of TLS"],
)
async def test_a_response_is_complete_however_it_arrives(
    answer: bytes, cut_into: int, body: bytes, version: str, authority: Authority
) -> None:
    async with _server(_tls(authority, version), answer, cut_into=cut_into) as port:
        end = await _call(port, authority)

    assert isinstance(end, HttpResponse)
    assert end.body == body


@pytest.mark.parametrize("version", ["TLS 1.3", "TLS 1.2"])
async def test_a_response_without_a_length_that_may_be_cut_off_is_no_response(
    version: str, authority: Authority
) -> None:
    async with _server(_tls(authority, version), HEAD + b"\r\nok", cut_into=100, sends_tls_close=False) as port:
        end = await _call(port, authority)

    assert isinstance(end, NoResponse)
    assert end.status == 200


def _tls(authority: Authority, version: str) -> ssl.SSLContext:
    return authority.server if version == "TLS 1.3" else authority.server_of_tls_1_2


async def test_a_connection_that_closes_with_the_handshake_is_not_used_and_is_freed(
    authority: Authority,
) -> None:
    """The server's TLS close arrives together with the end of the handshake."""
    transport = HttpTransport(connections=1, ca_file=authority.ca_file)
    before = _connections()
    deadline = asyncio.get_running_loop().time() + PATIENCE
    for _ in range(3):
        async with _server(authority.server_of_tls_1_2, b"", cut_into=4096, is_brief=True) as port:
            with pytest.raises(RequestNotSent, check=lambda error: error.reason is Reason.CONNECTION_FAILED):
                await transport.post(f"https://127.0.0.1:{port}/", {}, b"{}", FakeAttempt(1, deadline, pytest.fail))

    # A broken connection's transport refers to the connection until the next loop iteration.
    await until(lambda: _connections() <= before)
    await transport.close()


def _connections() -> int:
    """The number of connections in memory, including other tests' connections."""
    gc.collect()
    return sum(isinstance(each, HttpConnection) for each in gc.get_objects())


async def _call(port: int, authority: Authority) -> HttpResponse | NoResponse:
    transport = HttpTransport(connections=1, ca_file=authority.ca_file)
    deadline = asyncio.get_running_loop().time() + PATIENCE
    try:
        return await transport.post(f"https://127.0.0.1:{port}/", {}, b"{}", FakeAttempt(1, deadline, lambda: None))
    except NoResponse as error:
        return error
    finally:
        await transport.close()


@asynccontextmanager
async def _server(
    tls: ssl.SSLContext, answer: bytes, *, cut_into: int, sends_tls_close: bool = True, is_brief: bool = False
) -> AsyncIterator[int]:
    """Run a server that sends one response and closes the connection. The server splits its TLS output into pieces of
    `cut_into` octets."""

    def serve(listening: socket.socket) -> None:
        plain, _ = listening.accept()
        with plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            protocol = tls.wrap_bio(incoming, outgoing, server_side=True)
            if is_brief:
                _close_with_handshake(plain, incoming, outgoing, protocol)
                return
            _until_done(plain, incoming, outgoing, protocol.do_handshake)
            _until_done(plain, incoming, outgoing, lambda: protocol.read(4096))
            protocol.write(answer)
            if sends_tls_close:
                with suppress(ssl.SSLWantReadError):
                    protocol.unwrap()
            octets = outgoing.read()
            with suppress(ConnectionError):  # a client that has the whole response may have closed already
                for at in range(0, len(octets), cut_into):
                    plain.sendall(octets[at : at + cut_into])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        serving = asyncio.create_task(asyncio.to_thread(serve, listening))
        yield listening.getsockname()[1]
        await serving


def _close_with_handshake(
    plain: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, protocol: ssl.SSLObject
) -> None:
    """Send the end of the handshake and the TLS close in one packet."""

    def shake_hands_and_leave() -> None:
        protocol.do_handshake()
        with suppress(ssl.SSLWantReadError):
            protocol.unwrap()

    _until_done(plain, incoming, outgoing, shake_hands_and_leave)


def _until_done(
    plain: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, step: Callable[[], object]
) -> None:
    plain.settimeout(PATIENCE)
    while True:
        try:
            step()
            break
        except ssl.SSLWantReadError:
            plain.sendall(outgoing.read())
            incoming.write(plain.recv(65536))
    plain.sendall(outgoing.read())
