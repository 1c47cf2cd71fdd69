"""Connections: how fast the API accepts them, and what remains of those that ended."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct

import uvloop
from structlog.testing import capture_logs

from dispatcher.api.protocol import PatientProtocol
from dispatcher.config import Settings
from tests.api.place import Api, running
from tests.api.raw import exchange, request
from tests.waiting import until

HEALTH = request("/healthz", method="GET")


def connect(api: Api, sent: bytes) -> socket.socket:
    """A connection that the API has not accepted yet, since this test blocks its loop."""
    client = socket.create_connection(("127.0.0.1", api.port))
    client.send(sent)
    client.setblocking(False)
    return client


def has_answer(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return False


def test_many_new_connections_are_accepted_in_one_turn_of_the_loop(settings: Settings) -> None:
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


def test_a_connection_that_was_reset_before_it_was_accepted_is_not_read(settings: Settings) -> None:
    async def abuse() -> None:
        async with running(settings) as api:
            for _ in range(50):
                client = connect(api, b"no request\r\n\r\n")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            for _ in range(5):  # the connections before these have been accepted then
                assert await exchange(api, HEALTH) is not None

    with capture_logs() as events:
        uvloop.run(abuse())

    assert [event for event in events if event["event"] == "api.refused"] == []


def test_a_connection_that_ended_leaves_nothing_to_the_garbage_collector(settings: Settings) -> None:
    half = request("/v1/emails", "Content-Type: application/json", "Idempotency-Key: k", "Content-Length: 50") + b"{"

    async def count_left() -> None:
        async with running(settings) as api:
            before = count_protocols()
            for sent in (HEALTH, HEALTH * 5, b"", b"no request\r\n\r\n", half, HEALTH * 5 + half):
                for ends_with_reset in (False, True):
                    client = connect(api, sent)
                    await until(lambda: count_protocols() > before)
                    if ends_with_reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.close()
                    await until(lambda: count_protocols() == before)

    gc.collect()
    gc.disable()
    try:
        uvloop.run(count_left())
    finally:
        gc.enable()


def count_protocols() -> int:
    return sum(isinstance(each, PatientProtocol) for each in gc.get_objects())
