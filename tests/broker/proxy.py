"""A TCP proxy between the dispatcher and a real server. The proxy simulates network faults and alarms."""

from __future__ import annotations

import asyncio
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from dispatcher.dev.recording_server import stop


class Proxy:
    """Forwards bytes in both directions until a test disturbs it.

    Attributes:
        url: The server's URL, through the proxy.
        connections: The number of connections so far.
        holds: Whether the frozen proxy has received bytes that it does not forward to the server.
        received: All bytes of the clients.
    """

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._speaking = asyncio.Event()
        self._speaking.set()
        self._is_severed = False
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.holds = False
        self.received = bytearray()
        self._changes = (b"", b"")
        self._cuts_after: int | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        credentials = self._target.netloc.rpartition("@")[0]
        self.url = urlunsplit(self._target._replace(netloc=f"{credentials}@127.0.0.1:{port}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._server, self.cut)
        self.thaw()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_idle(self) -> bool:
        return not self._clients

    def cut(self) -> None:
        for client in self._clients:
            client.transport.abort()

    def cut_after(self, octets: int) -> None:
        """Drop every connection after the server has sent this number of further bytes."""
        self._cuts_after = octets

    def sever(self) -> None:
        """Drop every connection; until `thaw`, also drop each new connection."""
        self._is_severed = True
        self.cut()

    def freeze(self) -> None:
        """Until `thaw`, do not forward bytes from clients."""
        self.holds = False
        self._flowing.clear()

    def freeze_node(self) -> None:
        """Until `thaw`, forward no bytes in either direction, as if the server's processes were stopped."""
        self.freeze()
        self._speaking.clear()

    def thaw(self) -> None:
        """Forward the delayed bytes, and accept new connections."""
        self._is_severed = False
        self._flowing.set()
        self._speaking.set()

    def tell_clients(self, frame: bytes) -> None:
        """Write a frame to every client as if RabbitMQ had sent it. No other frame may be in transit."""
        for client in self._clients:
            client.write(frame)

    def change(self, old: bytes, new: bytes) -> None:
        """From now on, forward these bytes of clients as other bytes."""
        self._changes = (old, new)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if task := asyncio.current_task():
            self._tasks.add(task)
        if self._is_severed:
            writer.transport.abort()
            return
        self._clients.add(writer)
        try:
            above, below = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            self._clients.discard(writer)
            writer.transport.abort()
            return
        back = asyncio.create_task(self._pass(above, writer))
        try:
            while data := await reader.read(65536):
                self.received += data
                self.holds = not self._flowing.is_set()
                await self._flowing.wait()
                below.write(data.replace(*self._changes) if self._changes[0] else data)
                await below.drain()
        except OSError:
            pass
        finally:
            self._clients.discard(writer)
            below.transport.abort()
            await asyncio.gather(back, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._speaking.wait()
                writer.write(data)
                await writer.drain()
                self._count(len(data))
        except OSError:
            pass
        finally:
            writer.close()

    def _count(self, octets: int) -> None:
        if self._cuts_after is not None:
            self._cuts_after -= octets
            if self._cuts_after <= 0:
                self._cuts_after = None
                self.cut()
