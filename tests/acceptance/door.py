"""A way to a server of the test run that can be shut, as when the server is down for one program alone."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from dispatcher.dev.ports import choose


class Door:
    """Passes bytes both ways while it is open; shut, nobody listens.

    Attributes:
        url: The server's, through the door.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 0)
        (self._port,) = choose(1)  # as nobody else is given: it has to be free again when the door opens again
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._passing: list[socket.socket] = []
        self._changing = threading.Lock()
        """Held to shut, and to let somebody in: who comes at that moment is either refused or broken off."""
        credentials = parts.netloc.rpartition("@")[0]
        self.url = urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{self._port}"))
        self._serve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def shut(self) -> None:
        """From now on connections are refused, and those that there are break off."""
        with self._changing:
            # Closing alone does not wake the thread that accepts.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for each in self._passing:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._passing.clear()

    def open(self) -> None:
        """As before, at the same place."""
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
