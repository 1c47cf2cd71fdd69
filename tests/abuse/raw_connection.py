"""Raw connections, on which the attackers send any bytes and read the responses."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import orjson

RESPONSE_SECONDS: Final = 20.0
CLOSE_SECONDS: Final = 1.0
"""How long a connection that is being closed may send the bytes that it has not sent yet."""
HOST: Final = "Host: 127.0.0.1"
JSON: Final = "Content-Type: application/json"


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", HOST, *headers, "", ""]).encode("latin-1")


def get(path: str, *headers: str) -> bytes:
    return head(f"GET {path}", *headers)


def post(path: str, body: bytes, *headers: str) -> bytes:
    return head(f"POST {path}", JSON, f"Content-Length: {len(body)}", *headers) + body


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, *, receive_bytes: int | None = None) -> Self:
        client = socket.socket()
        client.setblocking(False)
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=client, limit=1 << 16))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()  # the server does not read the rest
        except OSError:
            pass  # the server has reset the connection

    async def send(self, octets: bytes) -> bool:
        """Sends bytes; returns whether the connection is still open."""
        try:
            self._writer.write(octets)
            await self._writer.drain()
        except ConnectionError:
            return False
        return True

    def end_sending(self) -> None:
        with suppress(OSError):
            self._writer.write_eof()

    def reset(self) -> None:
        client = self._writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def answer(self) -> str:
        """The status and problem code of the next response; `end`, `reset` or `silence` if no response arrives."""
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                return await self._answer()
        except asyncio.IncompleteReadError as error:
            return "end" if not error.partial else "part of a response"
        except TimeoutError:
            return "silence"
        except OSError:
            return "reset"

    async def answers(self) -> str:
        """All responses until the connection ends, such as `200 + 400 malformed-request + end`."""
        found: list[str] = []
        while not found or found[-1][:1].isdigit():
            found.append(await self.answer())
        return " + ".join(found)

    async def _answer(self) -> str:
        top = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = top.split(" ", 2)[1]
        if status == "100":
            return await self._answer()
        lengths = [line for line in top.lower().split("\r\n") if line.startswith("content-length:")]
        body = await self._reader.readexactly(int(lengths[0].partition(":")[2]) if lengths else 0)
        return f"{status} {orjson.loads(body)['code']}" if "application/problem+json" in top else status


async def exchange(port: int, pieces: Iterable[bytes]) -> str:
    """Sends the pieces until the connection breaks; returns the first response."""
    return await _sent(port, pieces, RawConnection.answer)


async def provoke(port: int, pieces: Iterable[bytes]) -> str:
    """Sends all pieces; returns all responses until the connection ends."""
    return await _sent(port, pieces, RawConnection.answers)


async def _sent(port: int, pieces: Iterable[bytes], read: Callable[[RawConnection], Awaitable[str]]) -> str:
    async with await RawConnection.open(port) as connection:
        sending = asyncio.create_task(_send_all(connection, pieces))
        result = await read(connection)
        sending.cancel()
        return result


async def _send_all(connection: RawConnection, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        if not await connection.send(piece):
            return
