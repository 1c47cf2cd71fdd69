"""Tunnels TLS connections through an HTTP proxy. The variables HTTPS_PROXY and NO_PROXY configure the proxy."""

from __future__ import annotations

import asyncio
import re
import socket
from base64 import b64encode
from typing import Final
from urllib.parse import unquote, urlsplit

from dispatcher.domain.scrub import scrub
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import ConfigurationError

MAX_HEAD_OCTETS: Final = 16 * 1024
"""The maximum size of a proxy's response."""
_GRANTED: Final = re.compile(rb"HTTP/1\.[01] 2\d\d[ \r]")
_END: Final = b"\r\n\r\n"


class ProxyRefused(OSError):
    """The proxy opened no tunnel. The text contains the proxy's response, without addresses and credentials."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """An HTTP proxy, to which we connect without TLS. `login`: `user:password` from its URL, or None."""

    host: str
    port: int
    login: str | None = field(default=None, repr=False)


def proxy_for(url: str) -> HttpProxy | None:
    """The proxy that the environment variables set for a URL, if any. Raises ConfigurationError if we cannot use it."""
    from urllib.request import getproxies, proxy_bypass  # imported here, because the import takes 10 ms

    target = urlsplit(url)
    named = getproxies().get(target.scheme)
    if not named or proxy_bypass(target.netloc):
        return None
    variable = f"{target.scheme}_proxy".upper()
    remedy = f"Set a different proxy, or exempt the host: NO_PROXY={target.hostname}."
    if target.scheme != "https":
        words = f"{variable} sets a proxy for {target.scheme}://, but proxies are supported for https:// only."
        raise ConfigurationError([f"{words} {remedy}"])
    try:
        proxy = urlsplit(named if "://" in named else f"http://{named.removeprefix('//')}")
        port = proxy.port or 80
    except ValueError:
        raise ConfigurationError([f"{variable} must be a URL such as http://proxy.example.com:3128."]) from None
    if proxy.scheme != "http" or not proxy.hostname:
        raise ConfigurationError([f"{variable} must have the form http://host:port. {remedy}"])
    login = f"{unquote(proxy.username)}:{unquote(proxy.password)}" if proxy.username and proxy.password else None
    return HttpProxy(proxy.hostname, port, login)


async def open_tunnel(proxy: HttpProxy, connected: socket.socket, host: str, port: int) -> None:
    """Opens a tunnel to a host and port through a connected socket. Closes the socket if that fails."""
    try:
        answer = await _asked(proxy, connected, host, port)
        if not (_GRANTED.match(answer) and answer.endswith(_END)):
            line = answer.partition(b"\r\n")[0][:80].decode("ascii", "replace")
            shown = repr(line) if answer.endswith(_END) else "with invalid HTTP"
            raise ProxyRefused(scrub(f"the proxy answered {shown}"))  # noqa: TRY301 - the except clause closes the socket
    except BaseException:
        connected.close()
        raise


async def _asked(proxy: HttpProxy, connected: socket.socket, host: str, port: int) -> bytes:
    """Sends CONNECT. Returns the head of the response, unchecked, and incomplete if the proxy closes the connection."""
    loop = asyncio.get_running_loop()
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
    if proxy.login is not None:
        lines.append(f"Proxy-Authorization: Basic {b64encode(proxy.login.encode()).decode()}")
    await loop.sock_sendall(connected, "\r\n".join((*lines, "", "")).encode("ascii"))
    answer = b""
    while _END not in answer and len(answer) < MAX_HEAD_OCTETS:
        octets = await loop.sock_recv(connected, MAX_HEAD_OCTETS)
        if not octets:
            break
        answer += octets
    return answer
