"""Resolves host names that applications choose. Their name servers may never answer, and must not delay other work."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

from dispatcher.host.daemon_thread import in_daemon_thread


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host name, in the order of the system's resolver, each once.

    Each call has its own thread: a silent name server would occupy the few threads in which the loop resolves all other
    names, such as those of PostgreSQL and of the alerts' SMTP server.
    """
    find = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in await in_daemon_thread(find, "name lookup")))
