"""The local servers end every connection when they stop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from dispatcher.dev.recording_server import stop


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_was_accepted_a_moment_ago_is_ended(turns: int) -> None:
    opened = set[asyncio.BaseTransport]()

    class Session(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            opened.add(transport)

    def drop() -> None:
        for transport in opened:
            assert isinstance(transport, asyncio.Transport)
            transport.abort()

    server = await asyncio.get_running_loop().create_server(Session, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.settimeout(10)
        for _ in range(turns):
            await asyncio.sleep(0)

        await stop(server, drop)

        with suppress(ConnectionResetError):  # the kernel had accepted the connection, and the server had not
            assert await asyncio.to_thread(client.recv, 1) == b""
