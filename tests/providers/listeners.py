"""TCP servers, also such that fail before HTTP begins, and their clients, which are closed after a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar

from dispatcher.dev.http_double import HttpDouble
from dispatcher.dev.recording_server import stop

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Closable(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


@asynccontextmanager
async def closing(client: C) -> AsyncIterator[C]:
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[int]:
    """Run a TCP server that calls the handler for each connection and then closes the connection; yields the port."""
    sessions: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        sessions[task] = writer
        with suppress(OSError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    def drop() -> None:
        for writer in sessions.values():
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await stop(server, drop)
        await asyncio.gather(*sessions)


async def close_at_once(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    pass


async def stay_silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


@asynccontextmanager
async def proxy(
    answer: bytes, double: HttpDouble | None = None, heads: list[bytes] | None = None
) -> AsyncIterator[str]:
    """Run a proxy that gives this answer to CONNECT, and then relays to `double` if given; yields the proxy's URL.
    The proxy adds each request head to `heads`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(head)
        writer.write(answer)
        if double is not None:
            behind = await asyncio.open_connection("127.0.0.1", double.port)
            await asyncio.gather(copy(reader, behind[1]), copy(behind[0], writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while octets := await reader.read(65536):
                writer.write(octets)
        writer.close()

    async with listening(serve) as port:
        yield f"http://127.0.0.1:{port}"
