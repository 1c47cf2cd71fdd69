"""Asks this host's monitor about the host's processes."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any, Final

import h11
import orjson

from dispatcher.config.values import Listener
from dispatcher.domain.text import printable

ASK_SECONDS: Final = 1.0
MOST_OCTETS: Final = 65536
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a monitor may listen


async def ask_unready(listener: Listener) -> str | None:
    """The processes of this host that should work and do not, and why; None if all work, or if no monitor answers.

    Args:
        listener: Where the monitor listens.
    """
    if not listener.host:
        return None
    try:
        async with asyncio.timeout(ASK_SECONDS):
            said = orjson.loads(await _get(_ANYWHERE.get(listener.host, listener.host), listener.port, "/readyz"))
            reason: Any = said["checks"]["processes"]["reason"]
    except (OSError, TimeoutError, h11.RemoteProtocolError, ValueError, LookupError, TypeError):
        return None
    # Another program may listen there, so the text is not trusted.
    return printable(reason) if isinstance(reason, str) else None


async def _get(host: str, port: int, path: str) -> bytes:
    """The body of a page of our own web server, whatever its status."""
    reader, writer = await asyncio.open_connection(host, port)
    with closing(writer):
        connection = h11.Connection(h11.CLIENT)
        head = h11.Request(method="GET", target=path, headers=[("Host", "localhost"), ("Connection", "close")])
        writer.write((connection.send(head) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        body = b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if isinstance(event, h11.Data):
                body += event.data
            elif event is h11.NEED_DATA and len(body) < MOST_OCTETS:
                connection.receive_data(await reader.read(4096))
            elif event is h11.NEED_DATA:
                raise ValueError("the page is too long")
    return body
