"""A proxy to a server of the test run. A test shuts the proxy to make the server unreachable for one program, but not
for other tests."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from dispatcher.dev.ports import choose


class ClosableProxy:
    """While open, forwards bytes in both directions. While shut, does not listen on its port.

    Attributes:
        url: The server's URL, through the proxy.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 0)
        # The port is outside the ephemeral range, so no other socket takes the port while the proxy is shut.
        (self._port,) = choose(1)
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._passing: list[socket.socket] = []
        self._changing = threading.Lock()
        """A lock for shutting and for accepting a connection. So each connection is either refused or cut."""
        credentials = parts.netloc.rpartition("@")[0]
        self.url = urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{self._port}"))
        self._serve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def shut(self) -> None:
        """Refuse new connections, and cut the existing connections."""
        with self._changing:
            # Closing the socket would not wake the thread that waits in `accept`.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for each in self._passing:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._passing.clear()

    def open(self) -> None:
        """Accept connections again, on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._serve()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with self._changing:
                    if listener.fileno() < 0:
                        client.close()
                        return
                    server = socket.create_connection(self._target)
                    self._passing += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=[one, other], daemon=True).start()

    @staticmethod
    def _pass(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError), one:
            while data := one.recv(65536):
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)
