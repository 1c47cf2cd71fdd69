"""Connects to a host over TCP. If one of the host's addresses is silent, the next address is tried in parallel."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Final

from aiohappyeyeballs import AddrInfoType, start_connection

FALLBACK_SECONDS: Final = 0.25
"""The delay before the next address of a host is tried in parallel (RFC 8305, section 5)."""


async def connect(host: str, port: int) -> socket.socket:
    """Connects to the first address that accepts. Has no time limit. Raises OSError, with the reason in `strerror`."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not valid"
        raise socket.gaierror(socket.EAI_NONAME, f"the host name {host} cannot be resolved ({why})") from error
    return await connect_to(addresses, host)


async def connect_to(addresses: Sequence[AddrInfoType], host: str) -> socket.socket:
    """Connects to the first of the host's addresses that accepts, as `connect` does."""
    try:
        return await start_connection(addresses, happy_eyeballs_delay=FALLBACK_SECONDS, interleave=1)
    except OSError as error:
        # The library's texts list the addresses. If the addresses failed for different reasons, there is no number.
        words = os.strerror(error.errno) if error.errno else f"no address of {host} accepts the connection"
        raise OSError(error.errno, words) from error
