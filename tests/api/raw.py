"""Sends requests over raw sockets, because an HTTP client cannot send such requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tests.api.running_api import Answer, Api

DEADLINE_SECONDS = 20.0


async def exchange(api: Api, *pieces: bytes) -> Answer | None:
    """Sends bytes in pieces; returns the response, or None if the connection ends without a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await _send(writer, pieces)
            return await _answer(reader)
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:  # the API refused the request early; the response may have arrived
            return


async def _answer(reader: asyncio.StreamReader) -> Answer | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    except (ConnectionError, asyncio.IncompleteReadError):
        return None
    return Answer(int(status.split()[1]), headers, body)


def request(path: str = "/v1/emails", *headers: str, method: str = "POST") -> bytes:
    """A request line with headers."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
