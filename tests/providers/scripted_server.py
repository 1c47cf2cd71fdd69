"""An SMTP server with a scripted reply for each command, also such that a correct server would not give."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from dispatcher.config.values import SmtpServer
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.listeners import closing, listening

GREETING: Final = "greeting"
END: Final = "."
PLAIN: Final = {
    GREETING: "220 hi",
    "EHLO": "250-hi\r\n250-AUTH PLAIN LOGIN\r\n250 SIZE",
    "AUTH": "235 welcome",
    **dict.fromkeys(("RSET", "MAIL", "RCPT"), "250 ok"),
    "DATA": "354 go",
    END: "250 queued",
    "QUIT": "221 bye",
}
USER, PASSWORD = LOGIN = ("ann", "correct horse")


@dataclass
class ScriptedServer:
    """The server's script and its record.

    Attributes:
        replies: The replies by a command's verb; may be changed during the session.
        later: The replies on every connection after the first connection.
        login: The replies to lines without a reply in `replies`, in order.
        hello: The name in EHLO.
        lines: The lines without a reply in `replies`, decoded from Base64.
        ends: How many final dots the server has read.
    """

    replies: Mapping[str, str]
    later: Mapping[str, str] = field(default_factory=dict)
    login: list[str] = field(default_factory=list)
    hello: str = ""
    lines: list[str] = field(default_factory=list)
    connections: int = 0
    ends: int = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies = self.later if self.later and self.connections else self.replies
        self.connections += 1
        writer.write(f"{replies[GREETING]}\r\n".encode())
        verb = ""
        while verb != "QUIT" and (line := (await reader.readline()).decode().rstrip("\r\n")):
            verb, _, rest = line.partition(" ")
            if verb == "EHLO":
                self.hello = rest
            if not (reply := replies.get(verb)):
                self.lines.append(_decoded(line))
                reply = self.login.pop(0) if self.login else "500 what?"
            writer.write(f"{reply}\r\n".encode())
            if verb == "DATA" and reply.startswith("354"):
                await reader.readuntil(b"\r\n.\r\n")
                self.ends += 1
                writer.write(f"{replies[END]}\r\n".encode())


def _decoded(line: str) -> str:
    *method, last = line.split(" ")
    if line == "*" or len(method) == 1:
        return line
    return " ".join([*method, base64.b64decode(last).decode()])


@asynccontextmanager
async def scripted(
    server: ScriptedServer, login: tuple[str, str] = LOGIN, *, idle_seconds: float = 5.0, **own: Any
) -> AsyncIterator[SmtpProvider]:
    """Run the server; yields an adapter with at most one connection to it."""
    async with listening(server.talk) as port:
        settings = SmtpSettings(url=SmtpServer("127.0.0.1", port, "none", *login), connections=1, **own)
        async with closing(SmtpProvider(settings, trusted_idle_seconds=idle_seconds)) as provider:
            yield provider
