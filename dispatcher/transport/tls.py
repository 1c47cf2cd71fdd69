"""TLS: whom our clients trust, and a protocol's way to its socket, OpenSSL by `ssl.SSLObject`, with little around it.

The event loop's own TLS costs a fifth of all that a request does here: an exception for each answer, because it reads
until there is nothing, and some layers that serve streams. A request and its answer are one record each.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any, Final, cast

_READ_OCTETS: Final = 16 * 1024
"""A record's most (RFC 8446, section 5.1)."""


def client_context(ca_file: Path | str | None = None) -> ssl.SSLContext:
    """A context that verifies the server's certificate and its name.

    Some builds of Python (Debian 12's) accept a connection that ends without TLS's closing message. Anybody on the way
    could then cut off an answer that has no length. This context treats such an end as an error.

    Args:
        ca_file: Trusted instead of the system's certificates; None for those.

    Raises:
        OSError: the file cannot be read, or holds no certificates (ssl.SSLError is an OSError).
    """
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    return context


class Tls(asyncio.Protocol, asyncio.Transport):
    """Both of what asyncio knows: to the socket a protocol, and to the protocol above its transport.

    That protocol is told `connection_made` once TLS stands, and hears nothing of a connection that never did.

    Attributes:
        stands: Done once TLS stands; or with why it does not, as OSError (`ssl.SSLError` is one).
    """

    def __init__(self, context: ssl.SSLContext, above: asyncio.Protocol, *, server_hostname: str | None = None) -> None:
        """
        Args:
            server_hostname: Whose certificate it must be; None at a server's end.
        """
        super().__init__()
        self.stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._above = above
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._below: asyncio.Transport
        self._is_up = False
        self._error: Exception | None = None

    # What the socket tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP stands."""
        self._below = cast(asyncio.Transport, transport)
        self._shake_hands()

    def data_received(self, data: bytes) -> None:
        """Some octets, of any number of records."""
        self._incoming.write(data)
        if self._is_up or self._shake_hands():
            self._read()

    def eof_received(self) -> None:
        """The other side says no more. Without TLS's own goodbye that is a fault: anybody can cut a connection."""
        self._incoming.write_eof()
        if self._is_up or self._shake_hands():
            self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended, by whomever."""
        error = self._error or exc
        if self._is_up:
            self._above.connection_lost(error)
        elif not self.stands.done():
            self.stands.set_exception(error or ConnectionResetError())
            self.stands.exception()  # at a server's end, and after a cancelled call, nobody asks

    def pause_writing(self) -> None:
        """The system takes no more for now."""
        if self._is_up:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        """The system has taken everything."""
        if self._is_up:
            self._above.resume_writing()

    # What the protocol above asks for.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts and sends."""
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            self._break(error)
        else:
            self._below.write(self._outgoing.read())

    def abort(self) -> None:
        """Drops the connection, whatever was not sent."""
        self._below.abort()

    def close(self) -> None:
        """Ends the connection once everything was sent."""
        self._below.close()

    def is_closing(self) -> bool:
        """Whether it ends, or has ended."""
        return self._below.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the socket's transport knows."""
        return self._below.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """How many octets the system has not taken."""
        return self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """When to pause and resume."""
        self._below.set_write_buffer_limits(high, low)

    def _shake_hands(self) -> bool:
        """Goes on with the handshake; whether it is over, and well."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._flush()  # the alert that tells the other side why
            self._error = error
            self._below.close()
            return False
        self._flush()
        self._is_up = True
        self._above.connection_made(self)
        if not self.stands.done():
            self.stands.set_result(None)
        return True

    def _read(self) -> None:
        """Hands up what can be decrypted."""
        while not self._below.is_closing():
            try:
                octets = self._tls.read(_READ_OCTETS)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                self._break(error)
                return
            if not octets:
                self._above.eof_received()
                self._below.close()
                return
            self._above.data_received(octets)
            # Nearly always: to ask OpenSSL for more would cost an exception.
            if not (self._incoming.pending or self._incoming.eof or self._tls.pending()):
                break
        self._flush()

    def _break(self, error: ssl.SSLError) -> None:
        self._error = error
        self._flush()
        self._below.abort()

    def _flush(self) -> None:
        """Sends what TLS itself has to say."""
        if self._outgoing.pending:
            self._below.write(self._outgoing.read())
