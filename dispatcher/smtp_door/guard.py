"""Limits what one address, and all addresses together, may do before they have logged in."""

from __future__ import annotations

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

FREE_FAILURES: Final = 10
"""How many failed logins of an address are answered within `FORGIVEN_SECONDS`. After that, a failure closes the
connection, and a new key is not looked up in the database."""
FORGIVEN_SECONDS: Final = 60.0
LONGEST_DELAY_SECONDS: Final = 8.0
_MOST_ADDRESSES: Final = 10_000


def network_of(address: str) -> str:
    """What counts as one address: an IPv4 address, or an IPv6 network /64, which usually belongs to one host."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


class Guard:
    """Counts open connections, and failed logins, by address."""

    def __init__(
        self,
        *,
        connections: int,
        per_address: int,
        delay_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`delay_seconds`: how long the answer to the first failed login of an address is delayed."""
        self._connections = connections
        self._per_address = per_address
        self._delay_seconds = delay_seconds
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, how many

    def enter(self, address: str) -> str | None:
        """Counts a new connection. Returns the reply, and counts nothing, if there are too many."""
        if self._open.total() >= self._connections:
            return "421 4.3.2 This server has too many connections. Retry later."
        if self._open[address] >= self._per_address:
            return "421 4.7.0 Your address has too many connections to this server. Close some, or retry later."
        self._open[address] += 1
        return None

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def is_blocked(self, address: str) -> bool:
        since, failures = self._failures.get(address, (0.0, 0))
        return failures >= FREE_FAILURES and self._clock() - since < FORGIVEN_SECONDS

    def fail(self, address: str) -> float:
        """Counts a failed login. Returns for how many seconds to delay the answer."""
        now = self._clock()
        since, failures = self._failures.pop(address, (now, 0))
        if now - since >= FORGIVEN_SECONDS:
            since, failures = now, 0
        self._failures[address] = (since, failures + 1)
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)
        return min(LONGEST_DELAY_SECONDS, self._delay_seconds * (1 << min(failures, 8)))
