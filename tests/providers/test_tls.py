"""TLS between our HTTP and the socket: however the octets are cut, and however a connection ends."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import pytest

from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_answer import Answer, NoAnswer, NothingLeft
from dispatcher.transport.http_connection import HttpConnection
from tests.providers.attempts import FakeAttempt
from tests.providers.conftest import Authority
from tests.waiting import until

PATIENCE: Final = 20.0
HEAD: Final = b"HTTP/1.1 200 OK\r\n"
BODY: Final = b"x" * 60_000
"""Four records, and less than is kept of an answer."""


@pytest.fixture(params=["TLS 1.3", "TLS 1.2"])
def server_tls(request: pytest.FixtureRequest, authority: Authority) -> ssl.SSLContext:
    """The server's side."""
    return authority.server if request.param == "TLS 1.3" else authority.server_of_tls_1_2


async def test_an_answer_of_several_records_is_whole(server_tls: ssl.SSLContext, authority: Authority) -> None:
    answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    async with _server(server_tls, answer, cut_into=len(answer)) as port:
        end = await _call(port, authority)

    assert isinstance(end, Answer)
    assert end.body == BODY


async def test_an_answer_that_comes_octet_by_octet_is_whole(server_tls: ssl.SSLContext, authority: Authority) -> None:
    answer = HEAD + b"Content-Length: 2\r\n\r\nok"
    async with _server(server_tls, answer, cut_into=1) as port:
        end = await _call(port, authority)

    assert isinstance(end, Answer)
    assert end.body == b"ok"


async def test_an_answer_without_a_length_ends_with_tls(server_tls: ssl.SSLContext, authority: Authority) -> None:
    async with _server(server_tls, HEAD + b"\r\nok", cut_into=100) as port:
        end = await _call(port, authority)

    assert isinstance(end, Answer)
    assert end.body == b"ok"


async def test_an_answer_without_a_length_that_anybody_may_have_cut_off_is_none(
    server_tls: ssl.SSLContext, authority: Authority
) -> None:
    async with _server(server_tls, HEAD + b"\r\nok", cut_into=100, says_goodbye=False) as port:
        end = await _call(port, authority)

    assert isinstance(end, NoAnswer)
    assert end.status == 200


async def test_nothing_is_kept_of_a_connection_that_ended_as_it_began(authority: Authority) -> None:
    """Its goodbye comes with the end of the handshake: before we have heard that TLS stands."""
    transport = HttpTransport(connections=1, ca_file=authority.ca_file)
    before = _connections()
    deadline = asyncio.get_running_loop().time() + PATIENCE
    for _ in range(3):
        async with _server(authority.server_of_tls_1_2, b"", cut_into=4096, is_brief=True) as port:
            with pytest.raises(NothingLeft):
                await transport.post(f"https://127.0.0.1:{port}/", {}, b"{}", FakeAttempt(1, deadline, lambda: None))

    # Of a connection that broke its transport is told a turn of the loop later, and holds it until then.
    await until(lambda: _connections() <= before)
    await transport.close()


def _connections() -> int:
    """How many are in memory, others' included."""
    gc.collect()
    return sum(isinstance(each, HttpConnection) for each in gc.get_objects())


async def _call(port: int, authority: Authority) -> Answer | NoAnswer:
    transport = HttpTransport(connections=1, ca_file=authority.ca_file)
    deadline = asyncio.get_running_loop().time() + PATIENCE
    try:
        return await transport.post(f"https://127.0.0.1:{port}/", {}, b"{}", FakeAttempt(1, deadline, lambda: None))
    except NoAnswer as error:
        return error
    finally:
        await transport.close()


@asynccontextmanager
async def _server(
    tls: ssl.SSLContext, answer: bytes, *, cut_into: int, says_goodbye: bool = True, is_brief: bool = False
) -> AsyncIterator[int]:
    """A server with one answer and then an end; what it sends is cut into pieces of so many octets of TLS's own."""

    def serve(listening: socket.socket) -> None:
        plain, _ = listening.accept()
        with plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            conversation = tls.wrap_bio(incoming, outgoing, server_side=True)
            if is_brief:
                _say_goodbye_at_once(plain, incoming, outgoing, conversation)
                return
            _until_done(plain, incoming, outgoing, conversation.do_handshake)
            _until_done(plain, incoming, outgoing, lambda: conversation.read(4096))
            conversation.write(answer)
            if says_goodbye:
                with suppress(ssl.SSLWantReadError):
                    conversation.unwrap()
            octets = outgoing.read()
            with suppress(ConnectionError):  # who has the whole answer need not hear the goodbye
                for at in range(0, len(octets), cut_into):
                    plain.sendall(octets[at : at + cut_into])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        serving = asyncio.create_task(asyncio.to_thread(serve, listening))
        yield listening.getsockname()[1]
        await serving


def _say_goodbye_at_once(
    plain: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, conversation: ssl.SSLObject
) -> None:
    """The handshake's last octets and the goodbye in one packet."""

    def shake_hands_and_leave() -> None:
        conversation.do_handshake()
        with suppress(ssl.SSLWantReadError):
            conversation.unwrap()

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
