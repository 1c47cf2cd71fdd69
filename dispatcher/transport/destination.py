"""Finds the addresses of a webhook's host, and checks that all are public, unless a setting allows private addresses.

The name is resolved once, and the connection goes to the checked addresses. So if a name resolves to a public address
first and to a private address a moment later (DNS rebinding), the webhook still reaches no private address.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from dispatcher.transport.tls_faults import cause_of_tls

Address = IPv4Address | IPv6Address
_TEXTS: Final = "192.0.0.0/24 192.88.99.0/24 ::/96 ::ffff:0:0:0/96 64:ff9b::/96 64:ff9b:1::/48 3fff::/20 5f00::/16"
_SPECIAL: Final = tuple(map(ip_network, (*_TEXTS.split(), "fec0::/10")))
"""Networks that are not public, although Python's `is_global` is true for some of their addresses: protocol
assignments, the anycast addresses of 6to4 relays, IPv4-compatible and IPv4-translated addresses, NAT64, documentation,
segment routing, site-local addresses."""
MAX_ADDRESSES: Final = 8
"""The most addresses of a host that are checked and tried. A hostile name server can return thousands."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host name and a port to addresses; raises OSError if the name has no address."""


class NoAnswer(Exception):
    """A receiver was not reached, or sent no valid answer in time. `reason` has no address, secret or foreign text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def addresses_of(host: str, port: int, *, private_setting: str | None, resolver: Resolve) -> Sequence[str]:
    """The addresses that a webhook may connect to, in the resolver's order; at most MAX_ADDRESSES. Raises NoAnswer.

    `private_setting`: the name of the setting that would allow addresses that are not public; the error mentions it.
    None if this setting is on, so that all addresses are allowed.
    """
    try:
        found = (await resolver(host, port))[:MAX_ADDRESSES]
    except (OSError, UnicodeError) as error:
        words = getattr(error, "strerror", None) or type(error).__name__
        raise NoAnswer(f"the host name cannot be resolved ({words.lower()})") from error
    if not found:
        raise NoAnswer("the host name has no address")
    if private_setting is not None and not all(is_public(ip_address(text.partition("%")[0])) for text in found):
        raise NoAnswer(f"the host has an address that is not public. {private_setting}=on allows such addresses")
    return found


def is_public(address: Address) -> bool:
    """Whether an address is reachable from the internet; of IPv4-mapped and 6to4 addresses, the IPv4 address counts."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)


def cause_of(error: BaseException) -> str:
    """Why a connection failed, without the server's own text, which may quote addresses or secrets."""
    if isinstance(error, ssl.SSLError):
        return cause_of_tls(error)
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, OSError) and error.errno and error.strerror:
        return error.strerror.lower()
    return f"the host was not reached ({type(error).__name__})"
