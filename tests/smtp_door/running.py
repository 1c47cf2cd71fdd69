"""A real SMTP door, with the event loop of the real process, and a client that sends exactly what a test says."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import uvloop

from dispatcher.admission.process import listen
from dispatcher.config import Settings
from dispatcher.smtp_door.server import serve
from tests.waiting import DEADLINE_SECONDS

SENDER: Final = "shop@example.com"
MESSAGE: Final = (
    b"From: Shop <shop@example.com>\r\nTo: ann@example.org\r\nSubject: Your receipt\r\n"
    b"Message-ID: <order-17@shop.example.com>\r\nDate: Tue, 01 Dec 2026 12:00:00 +0000\r\n\r\nThank you.\r\n"
)


def base64(text: str) -> str:
    return b64encode(text.encode()).decode()


def plain(token: str, user: str = "shop") -> str:
    return base64(f"\0{user}\0{token}")


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def reply(self) -> str:
        """The next reply, its lines separated by a space; empty if the server has closed the connection."""
        lines: list[str] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not lines or lines[-1][3:4] == "-":
                try:
                    line = await self.reader.readline()
                except ConnectionError:
                    line = b""
                if not line:
                    return ""
                lines.append(line.decode().rstrip())
        return " ".join(lines)

    async def say(self, line: str | bytes) -> str:
        await self.send(line.encode() + b"\r\n" if isinstance(line, str) else line)
        return await self.reply()

    async def send(self, octets: bytes) -> None:
        self.writer.write(octets)
        await self.writer.drain()

    async def start_tls(self, context: ssl.SSLContext) -> None:
        assert (await self.say("STARTTLS")).startswith("220 ")
        await self.writer.start_tls(context, server_hostname="localhost")

    async def log_in(self, token: str) -> None:
        assert (await self.say("EHLO [192.0.2.1]")).startswith("250")
        assert (await self.say(f"AUTH PLAIN {plain(token)}")).startswith("235 2.7.0")

    async def begin(self, *recipients: str, sender: str = SENDER) -> str:
        """Begins a message up to DATA; returns the first refusal, or the reply to DATA."""
        reply = ""
        for line in (f"MAIL FROM:<{sender}>", *(f"RCPT TO:<{each}>" for each in recipients), "DATA"):
            if not (reply := await self.say(line)).startswith(("250", "354")):
                return reply
        return reply

    async def submit(self, *recipients: str, content: bytes = MESSAGE, sender: str = SENDER) -> str:
        """The reply to a whole message, or to the command that was refused."""
        reply = await self.begin(*(recipients or ("ann@example.org",)), sender=sender)
        return await self.say(content + b".\r\n") if reply.startswith("354") else reply


@dataclass(frozen=True)
class RunningDoor:
    port: int
    settings: Settings
    stop: Callable[[], None]
    greetings: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def client(self, tls: ssl.SSLContext | None = None, *, source: str = "127.0.0.1") -> AsyncIterator[Client]:
        """A client that has read the greeting. `source`: its address."""
        host = "localhost" if tls else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname=host, local_addr=(source, 0)
        )
        try:
            client = Client(reader, writer)
            self.greetings.append(await client.reply())
            yield client
        finally:
            writer.transport.abort()


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[RunningDoor]:
    listener = listen(settings.submission_address, setting="DISPATCHER_SUBMISSION_ADDRESS", shares_port=False)
    started: Future[Callable[[], None]] = Future()

    async def work() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def end() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)

        started.set_result(end)
        await serve(settings, listener, stop, lock_seconds=DEADLINE_SECONDS, login_delay_seconds=0.001)

    serving = asyncio.create_task(asyncio.to_thread(uvloop.run, work()))
    stop = await asyncio.wrap_future(started)
    try:
        yield RunningDoor(listener.getsockname()[1], settings, stop)
    finally:
        stop()
        with listener:
            await serving
