"""What a thread that posts may still do, and what it has done: asked and told at the socket itself.

boto3's exceptions do not say whether a request left: a read timeout may come out of a TLS handshake, an SSL error out of
an answer that broke off. And a thread cannot be cancelled. So every connection of ours asks the attempt's `Departure`
before it writes a request, and refuses to write once nobody waits for the answer; a request that has left by then has its
socket shut, which ends the thread.

    waiting ──leave (its thread)──▶ left ──end (the loop)──▶ over, socket shut: may have been accepted
       └───────end (the loop)──────▶ over: nothing left, and nothing will
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from botocore.awsrequest import (
    AWSConnection,
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

from dispatcher.errors import ProviderFault

_LOCK: Final = threading.Lock()
"""One for all departures and connections: it is held for a microsecond, twice per email."""
_current: Final = threading.local()


class TooLate(Exception):
    """Raised where a request would be written whose attempt is over: nothing of it left."""


class Departure:
    """One attempt's way out, shared by the loop's thread and the one that posts."""

    def __init__(self, until: float) -> None:
        """
        Args:
            until: When the attempt's deadline passes, in `time.monotonic()`.
        """
        self._until = until
        self._is_over = False
        self._connection: WatchedConnection | None = None

    @property
    def has_left(self) -> bool:
        """Whether octets of the request may have left."""
        return self._connection is not None

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._is_over

    @contextmanager
    def here(self) -> Iterator[None]:
        """Within it, this departure is asked for every request that the current thread writes."""
        _current.departure = self
        try:
            yield
        finally:
            _current.departure = None

    def leave(self, connection: WatchedConnection) -> None:
        """Note that the request leaves now, over this connection.

        Raises:
            TooLate: it must not.
        """
        with _LOCK:
            if self._is_over or connection.is_severed or time.monotonic() >= self._until:
                raise TooLate
            connection.carries = self
            self._connection = connection

    def end(self) -> bool:
        """Stop waiting for an answer, and let nothing leave from now on; tells whether something had."""
        with _LOCK:
            self._is_over = True
            if self._connection is None:
                return False
            # A connection that has answered may carry somebody else by now.
            if self._connection.carries is self:
                self._connection.sever()
            return True


class WatchedConnection(AWSConnection):  # type: ignore[misc]
    """A connection that asks before it writes a request.

    Attributes:
        carries: Whose request it carried last; `_LOCK` guards it, as `is_severed`.
        is_severed: We shut it; it carries nothing more before it is connected again.
    """

    sock: Any
    carries: Departure | None = None
    is_severed = False
    _is_connecting = False

    def connect(self) -> None:
        """Connect (urllib3 calls this); what is written on the way, to a proxy, is no request."""
        self._is_connecting = True
        try:
            super().connect()
        finally:
            self._is_connecting = False
        with _LOCK:
            self.carries, self.is_severed = None, False

    def send(self, octets: Any) -> None:
        """Write part of a request (urllib3 calls this)."""
        departure: Departure | None = getattr(_current, "departure", None)
        if departure is not None and not self._is_connecting:
            if self.sock is None:
                self.connect()
            departure.leave(self)
        super().send(octets)

    def sever(self) -> None:
        """Shut the socket under the thread that reads from it. Only under `_LOCK`."""
        self.is_severed = True
        # SSLSocket's own method drops the TLS session, which belongs to the other thread.
        if isinstance(self.sock, socket.socket):
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class WatchedHTTPConnection(WatchedConnection, AWSHTTPConnection):  # type: ignore[misc]
    """In the clear."""


class WatchedHTTPSConnection(WatchedConnection, AWSHTTPSConnection):  # type: ignore[misc]
    """Over TLS."""


class _HTTPPool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = WatchedHTTPConnection


class _HTTPSPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = WatchedHTTPSConnection


def watch(client: Any) -> None:
    """Have a boto3 client use our connections; botocore has no public way.

    Raises:
        ProviderFault: this botocore is built differently, and nobody would ask before it writes.
    """
    pools = {"http": _HTTPPool, "https": _HTTPSPool}
    try:
        session = client._endpoint.http_session
        session._pool_classes_by_scheme.update(pools)
        is_watched = session._manager.pool_classes_by_scheme == pools
    except AttributeError:
        is_watched = False
    if not is_watched:
        raise ProviderFault(
            "ses",
            "this botocore does not let us see when a request leaves.",
            remedy="Install the versions that stand in requirements/runtime.txt.",
        )
