"""Limits failed attempts to sign in, per client address and in total."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Final

ATTEMPTS_PER_CLIENT: Final = 5
SECONDS_PER_CLIENT_ATTEMPT: Final = 10.0
"""After five failures, a client may make one attempt per interval of this length."""
ATTEMPTS_IN_TOTAL: Final = 60
SECONDS_PER_ATTEMPT: Final = 1.0
MAX_CLIENTS: Final = 10_000


class AttemptLimiter:
    """Decides how long a client must wait after failed attempts to sign in. Each process counts on its own.

    A client is an address, as `client_address` returns it. The limit per client is much lower than the limit for all
    clients together, so a single client cannot block all clients. A client that has signed in before does not wait
    because of other clients' failures.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Failures] = OrderedDict()
        self._all = _Failures(ATTEMPTS_IN_TOTAL, SECONDS_PER_ATTEMPT)
        self._known: OrderedDict[str, None] = OrderedDict()

    def seconds_to_wait(self, client: str) -> int:
        """How long a client has to wait for its next attempt; 0 if it may try now."""
        own = self._clients[client].seconds_to_wait() if client in self._clients else 0
        return own if client in self._known else max(own, self._all.seconds_to_wait())

    def add_failure(self, client: str) -> None:
        """Counts a failed attempt. It does not make others wait if the client has signed in before."""
        if client not in self._clients:
            self._clients[client] = _Failures(ATTEMPTS_PER_CLIENT, SECONDS_PER_CLIENT_ATTEMPT)
        self._clients.move_to_end(client)
        self._clients[client].add()
        if client not in self._known:
            self._all.add()
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)

    def add_success(self, client: str) -> None:
        """Remembers a client that has signed in, so that it does not wait because of other clients' failures.

        The client's own failures still count: otherwise, a client with a valid key could guess further keys.
        """
        self._known[client] = None
        self._known.move_to_end(client)
        if len(self._known) > MAX_CLIENTS:
            self._known.popitem(last=False)


class _Failures:
    """A number of failures, which decreases by one every `seconds` seconds. At `most` failures, attempts must wait."""

    __slots__ = ("_at", "_count", "_most", "_seconds")

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._count = 0.0
        self._at = time.monotonic()

    def _drain(self) -> None:
        now = time.monotonic()
        self._count = max(0.0, self._count - (now - self._at) / self._seconds)
        self._at = now

    def seconds_to_wait(self) -> int:
        self._drain()
        return max(0, math.ceil((self._count - (self._most - 1)) * self._seconds))

    def add(self) -> None:
        self._drain()
        self._count += 1
