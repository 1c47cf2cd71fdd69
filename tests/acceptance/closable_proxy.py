"""A proxy to a server of the test run. While it is shut, the server is unreachable for one program only."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from dispatcher.dev.ports import choose


class ClosableProxy:
    """Forwards bytes in both directions while it is open. While it is shut, nothing listens on its port.

    Attributes:
        url: The server's URL, through the proxy.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 0)
        # Outside the range of automatic ports, because it must still be free when the proxy opens again.
        (self._port,) = choose(1)
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._passing: list[socket.socket] = []
        self._changing = threading.Lock()
        """Held to shut, and to accept a connection. So each connection is either refused or cut."""
        credentials = parts.netloc.rpartition("@")[0]
        self.url = urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{self._port}"))
        self._serve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def shut(self) -> None:
        """Refuse new connections, and cut existing ones."""
        with self._changing:
            # Closing the socket does not wake the thread that accepts.
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
