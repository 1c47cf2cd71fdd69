"""The API accepts connections fast, and frees the memory of closed connections."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dispatcher.api.http_protocol import GuardedProtocol
from dispatcher.api.problems import Problem
from dispatcher.config import Settings
from tests.api.raw import request
from tests.api.running_api import EMAIL, Api, running
from tests.waiting import until

JSON = ("Content-Type: application/json", "Idempotency-Key: k")
HEALTH = request("/healthz", method="GET")


def connect(api: Api, sent: bytes) -> socket.socket:
    """Opens a connection and sends bytes. The API accepts the connection later, because the test runs in the API's
    event loop."""
    client = socket.create_connection(("127.0.0.1", api.port))
    client.send(sent)
    client.setblocking(False)
    return client


def has_answer(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return False


def test_many_new_connections_are_accepted_per_turn_of_the_event_loop(settings: Settings) -> None:
    async def turns() -> int:
        async with running(settings) as api:
            clients = [connect(api, HEALTH) for _ in range(64)]
            count = 0
            while not all(map(has_answer, clients)):
                await asyncio.sleep(0)
                count += 1
            for client in clients:
                client.close()
            return count

    assert uvloop.run(turns()) < 32


def test_a_closed_connection_leaves_no_reference_cycles(settings: Settings) -> None:
    partial_upload = request("/v1/emails", *JSON, "Content-Length: 50") + b"{"

    async def count_left() -> None:
        async with running(settings) as api:
            before = count_of(GuardedProtocol, HttpToolsProtocol)
            for sent in (HEALTH, b"", b"no request\r\n\r\n", partial_upload):
                for ends_with_reset in (False, True):
                    client = connect(api, sent)
                    await until(lambda: count_of(GuardedProtocol, HttpToolsProtocol) > before)
                    if ends_with_reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()
                    await until(lambda: count_of(GuardedProtocol, HttpToolsProtocol) == before)

    with without_collector():
        uvloop.run(count_left())


async def test_a_refused_request_leaves_no_reference_cycles(api: Api) -> None:
    """A reference cycle would keep the request's body, up to 40 MB, until the garbage collector runs."""
    with without_collector():
        for path, body, status in (
            ("/v1/emails", b"{", 400),
            ("/v1/emails", orjson.dumps(EMAIL | {"text": "a" * 100_000, "tags": 1}), 422),
            ("/v1/emails", b" " * 50_000_000, 413),
            ("/v1/emails/batch", orjson.dumps({"emails": [EMAIL | {"message_key": "k", "to": 1}, EMAIL, 1]}), 200),
            ("/v1/replays", b"[]", 422),
            ("/v1/nothing", b"{}", 404),
        ):
            assert (await api.call("POST", path, key="k", raw=body)).status == status
            await until(lambda: count_of(Problem) == 0)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_of(*kinds: type) -> int:
    return sum(isinstance(each, kinds) for each in gc.get_objects())
