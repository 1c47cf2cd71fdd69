"""Reads the state of this host's processes from its monitor."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any, Final

import orjson

from dispatcher.config.values import Listener
from dispatcher.domain.text import printable

ASK_SECONDS: Final = 1.0
MAX_OCTETS: Final = 65536
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - a monitor may listen on all addresses


async def fetch_unready(listener: Listener) -> str | None:
    """Which processes of this host are not ready, and why; None if all are ready, or if no monitor answers."""
    if not listener.host:
        return None
    try:
        async with asyncio.timeout(ASK_SECONDS):
            said = orjson.loads(await _get(_ANYWHERE.get(listener.host, listener.host), listener.port, "/readyz"))
            reason: Any = said["checks"]["processes"]["reason"]
    except (OSError, TimeoutError, ValueError, LookupError, TypeError):
        return None
    # Another program may listen on this address, so the text is not trusted.
    return printable(reason) if isinstance(reason, str) else None


async def _get(host: str, port: int, path: str) -> bytes:
    """The body of a page, whatever the HTTP status is. Closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    with closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        reply = b""
        while len(reply) < MAX_OCTETS and (octets := await reader.read(4096)):
            reply += octets
    return reply.partition(b"\r\n\r\n")[2]
