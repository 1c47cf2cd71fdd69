"""What a thread that posts may still do, and what it has done: asked and told at the socket itself.

boto3's exceptions do not say whether a request left: a read timeout may come out of a TLS handshake, an SSL error out
of an answer that broke off. And a thread cannot be cancelled. So every connection of ours, once it stands, asks the
attempt's `Departure` before it writes a request. The loop's thread grants it, by calling `leaving`, or refuses: then
nothing leaves. A request that has left by the deadline has its socket shut, which ends the thread.

    connecting ──granted──▶ left ──end──▶ over, socket shut: may have been accepted
        └──refused, or end──▶ over: nothing left, and nothing will
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
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
from dispatcher.providers.contract import Attempt

IDLE_SECONDS: Final = 20.0
"""Kept connections are given up after so long without use. Firewalls forget them silently, and a request that meets one
of those has left, and nobody can know whether it arrived."""
_LOCK: Final = threading.Lock()
"""Guards who is carried by which connection; held for a microsecond."""
_current: Final = threading.local()


class TooLate(Exception):
    """Raised where a request would be written that may not: nothing of it left."""


class Departure:
    """One attempt's way out, shared by the loop's thread, which decides, and the one that posts.

    Attributes:
        has_left: Octets of the request may have left, or will in a moment.
        is_over: Nobody waits for the answer any more.
        refusal: What `leaving` raised, if it did.
    """

    def __init__(self, attempt: Attempt) -> None:
        """The departure of an attempt that is under way on the running loop."""
        self._attempt = attempt
        self._loop = asyncio.get_running_loop()
        self._permission: Future[None] = Future()
        self._connection: WatchedConnection | None = None
        self.has_left = False
        self.is_over = False
        self.refusal: BaseException | None = None

    @contextmanager
    def here(self) -> Iterator[None]:
        """Within it, this departure is asked for every request that the current thread writes."""
        _current.departure = self
        try:
            yield
        finally:
            _current.departure = None

    def leave(self, connection: WatchedConnection) -> None:
        """Returns when the request may leave over this connection. For the thread that posts; again is harmless.

        Raises:
            TooLate: it may not.
            ConnectionAbortedError: not over this connection.
        """
        if self._connection is not None:
            return
        try:
            self._loop.call_soon_threadsafe(self._grant)
        except RuntimeError:
            raise TooLate from None  # the loop is closed
        self._permission.result()
        with _LOCK:
            if self.is_over:
                raise TooLate
            if connection.is_severed:
                self.has_left = False
                raise ConnectionAbortedError("the connection was shut under another attempt")
            connection.carries = self
            self._connection = connection

    def end(self) -> bool:
        """Stop waiting for the answer, and let nothing leave from now on; tells whether something may have left."""
        with _LOCK:
            self.is_over = True
            # A connection that has answered may carry somebody else by now.
            if self._connection is not None and self._connection.carries is self:
                self._connection.sever()
        self._refuse()
        return self.has_left

    def _grant(self) -> None:
        if self.is_over or self._loop.time() >= self._attempt.deadline:
            self._refuse()
            return
        try:
            self._attempt.leaving()
        except BaseException as refusal:  # noqa: BLE001 - whatever it is, it belongs to whoever waits for the outcome
            self.refusal = refusal
            self._refuse()
        else:
            self.has_left = True
            self._permission.set_result(None)

    def _refuse(self) -> None:
        if not self._permission.done():
            self._permission.set_exception(TooLate())


class WatchedConnection(AWSConnection):  # type: ignore[misc]
    """A connection that asks before it writes a request.

    Attributes:
        carries: Whose request it carried last; `_LOCK` guards it, as `is_severed`.
        is_severed: We shut it; it carries nothing more before it is connected again.
        used_at: When something was last written, in `time.monotonic()`.
    """

    sock: Any
    used_at = 0.0
    carries: Departure | None = None
    is_severed = False
    _is_connecting = False

    @property
    def is_connected(self) -> bool:
        """Whether it may carry another request (urllib3 asks this of a kept one)."""
        return bool(super().is_connected) and time.monotonic() - self.used_at < IDLE_SECONDS

    def connect(self) -> None:
        """Connect (urllib3 calls this); what is written on the way, to a proxy, is no request."""
        self._is_connecting = True
        try:
            super().connect()
        finally:
            self._is_connecting = False
        self.used_at = time.monotonic()
        with _LOCK:
            self.carries, self.is_severed = None, False

    def request(self, *positional: Any, **named: Any) -> None:
        """Begin a request (urllib3 calls this)."""
        # botocore lets an answer pass that is shorter than it says, and its broken connection back among the good ones.
        super().request(*positional, **{**named, "enforce_content_length": True})

    def send(self, octets: Any) -> None:
        """Write part of a request (urllib3 calls this)."""
        departure: Departure | None = getattr(_current, "departure", None)
        if departure is not None and not self._is_connecting:
            if self.sock is None:
                self.connect()
            departure.leave(self)
        self.used_at = time.monotonic()
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
