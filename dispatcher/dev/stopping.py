"""Stops the asyncio servers of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_TURNS: Final = 5
"""So many turns of the event loop after `accept`, the task that serves the connection has begun."""


async def stop(server: asyncio.Server, drop_connections: Callable[[], None]) -> None:
    """Stops listening and ends every connection, also one that was accepted a moment ago."""
    # asyncio leaves a connection open if the server is closed between `accept` and the creation of the transport.
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    server.close()
    drop_connections()
    await server.wait_closed()
    await asyncio.sleep(0)  # asyncio closes an aborted connection's socket in the next turn
