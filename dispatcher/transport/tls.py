"""A TLS layer for asyncio protocols, on `ssl.SSLObject`, and the certificates that our clients trust.

asyncio's own TLS would take a fifth of a request's CPU: it has layers for streams, and after each response it reads
once more, only to get OpenSSL's exception for missing input. This layer reads only once if the response is one TLS
record, which is the usual case.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

_READ_OCTETS: Final = 16 * 1024
"""The maximum number of octets in one record (RFC 8446, section 5.1)."""
_CIPHERS: Final = "@SECLEVEL=2:ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:DHE+AES:!aNULL:!eNULL:!aDSS:!SHA1:!AESCCM"
"""For TLS 1.2: what Python accepts if its build does not choose otherwise."""


def client_context(ca_file: Path | str | None = None) -> ssl.SSLContext:
    """A TLS context that verifies the server's certificate and host name. `ca_file`: instead of the system's.

    Some builds of Python (Debian 12's) accept old versions of TLS, weak ciphers, and a connection that ends without
    TLS's closing message. An attacker on the network could then cut off a response that has no length. This context
    does not accept them. Raises OSError (which ssl.SSLError is) if the file cannot be read, or contains no
    certificates.
    """
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    return context


@lru_cache(maxsize=4)
def http_context(ca_file: Path | None, trusted: Path | None) -> ssl.SSLContext:
    """A context for HTTP/1.1. It trusts the certificates in `ca_file`, and those in `trusted` or the system's.

    All callers share the context, and so do the processes that this process forks, because reading the system's
    certificates takes 20 ms. Do not change it. After `http_context.cache_clear()`, the files are read again.
    """
    context = client_context(trusted)
    if ca_file is not None:
        context.load_verify_locations(cafile=str(ca_file))
    context.set_alpn_protocols(["http/1.1"])
    return context


class Tls(asyncio.Protocol, asyncio.Transport):
    """A TLS layer between a socket's transport and a protocol (called the protocol above) that uses the connection.

    For the socket's transport, this object is a protocol. For the protocol above, it is a transport. It calls the
    `connection_made` of the protocol above when the handshake is complete. If the handshake fails, it calls no method
    of the protocol above.
    """

    def __init__(self, context: ssl.SSLContext, above: asyncio.Protocol, *, server_hostname: str | None = None) -> None:
        """`above` reads and writes the decrypted data. Without `server_hostname`, this is the server's side."""
        super().__init__()
        # raises the OSError that caused a failure
        self.handshake_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._above = above
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._below: asyncio.Transport
        self._is_established = False
        self._error: Exception | None = None

    # asyncio calls the following methods, for the socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the handshake. Called by asyncio when TCP is connected."""
        self._below = cast(asyncio.Transport, transport)
        self._handshake()

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._is_established or self._handshake():
            self._read()

    def eof_received(self) -> None:
        """If TLS's closing message is missing, this is an error: an attacker may have cut off data."""
        self._incoming.write_eof()
        if self._is_established or self._handshake():
            self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        error = self._error or exc
        if self._is_established:
            self._above.connection_lost(error)
        elif not self.handshake_done.done():
            self.handshake_done.set_exception(error or ConnectionResetError())
            # asyncio logs an exception that no code reads. On the server's side, and after a cancelled call, no other
            # code reads this exception, so read it here.
            self.handshake_done.exception()

    def pause_writing(self) -> None:
        if self._is_established:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        if self._is_established:
            self._above.resume_writing()

    # The protocol that uses the connection calls the following methods.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            self._break(error)
        else:
            self._below.write(self._outgoing.read())

    def abort(self) -> None:
        self._below.abort()

    def close(self) -> None:
        self._below.close()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def _handshake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._flush()  # sends the TLS alert that reports the reason to the peer
            self._error = error
            self._below.close()
            return False
        self._flush()
        self._is_established = True
        self._above.connection_made(self)
        if not self.handshake_done.done():
            self.handshake_done.set_result(None)
        return True

    def _read(self) -> None:
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
            # Usually, all input has been read now, and asking OpenSSL for more would raise an exception.
            if not (self._incoming.pending or self._incoming.eof or self._tls.pending()):
                break
        self._flush()

    def _break(self, error: ssl.SSLError) -> None:
        self._error = error
        self._flush()
        self._below.abort()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._below.write(self._outgoing.read())
