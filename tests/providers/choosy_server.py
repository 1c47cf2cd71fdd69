"""An SMTP server that judges each recipient by a rule of the test, and counts the recipients who got each email."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dispatcher.config.values import SmtpServer
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.listeners import closing, listening

_ADDRESS = re.compile(r"<(.*?)>")
_MESSAGE_ID = re.compile(rb"^Message-ID: <(.+?)@", re.MULTILINE)
Rule = Callable[[str, int], str | None]
"""Gets a recipient, and the number of recipients that this transaction has already. Returns the reply that refuses the
recipient; None to accept."""
GroupFault = Callable[[list[str]], list[str]]
"""Gets the commands that arrived together. Returns the commands that the server reads; `!` and a reply to send this
reply instead."""


@dataclass
class _Transaction:
    has_sender: bool = False
    recipients: list[str] = field(default_factory=list)

    def end(self) -> None:
        self.has_sender, self.recipients = False, []


@dataclass
class ChoosyServer:
    """The server's rules and its ledger. `answer` gets the number of the transaction; returns the reply to the final
    dot, or None to accept the email. `groups`: the number of reads with several commands."""

    rule: Rule = lambda _recipient, _count: None
    answer: Callable[[int], str | None] = lambda _transaction: None
    group_fault: GroupFault = lambda commands: commands
    extensions: tuple[str, ...] = ("PIPELINING",)
    delivered: Counter[tuple[str, str]] = field(default_factory=Counter)
    contents: list[bytes] = field(default_factory=list)
    groups: int = 0
    transactions: int = 0

    def recipients(self, email_id: object) -> dict[str, int]:
        return {address: times for (found, address), times in self.delivered.items() if found == str(email_id)}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 choosy.test ESMTP\r\n")
        transaction = _Transaction()
        while data := await reader.read(65536):
            commands = data.decode().removesuffix("\r\n").split("\r\n")
            if len(commands) > 1:
                self.groups += 1
                commands = self.group_fault(commands)
            for command in commands:
                reply = command[1:] if command.startswith("!") else self._reply(command, transaction)
                writer.write(f"{reply}\r\n".encode())
                if reply.startswith("354"):
                    content = await reader.readuntil(b"\r\n.\r\n")
                    writer.write(f"{self._accept(content, transaction.recipients)}\r\n".encode())
                    transaction.end()
                if reply.startswith(("221", "421")):
                    return

    def _reply(self, command: str, transaction: _Transaction) -> str:
        verb = command[:4].upper()
        if verb == "EHLO":
            return "250-choosy.test\r\n" + "".join(f"250-{each}\r\n" for each in self.extensions) + "250 HELP"
        if verb == "MAIL":
            is_nested, transaction.has_sender = transaction.has_sender, True
            return "503 5.5.1 nested MAIL" if is_nested else "250 2.1.0 Ok"
        if verb == "RCPT":
            address = _ADDRESS.findall(command)[0]
            refused = self.rule(address, len(transaction.recipients)) if transaction.has_sender else "503 5.5.1 MAIL?"
            transaction.recipients += [] if refused else [address]
            return refused or "250 2.1.5 Ok"
        if verb == "DATA":
            return "354 go ahead" if transaction.recipients else "503 5.5.1 no valid recipients"
        transaction.end()
        return "221 2.0.0 Bye" if verb == "QUIT" else "250 2.0.0 Ok"

    def _accept(self, content: bytes, recipients: list[str]) -> str:
        self.transactions += 1
        if refused := self.answer(self.transactions):
            return refused
        found = _MESSAGE_ID.search(content)
        assert found is not None
        self.delivered.update((found[1].decode(), address) for address in recipients)
        self.contents.append(content)
        return f"250 2.0.0 Ok: queued as T{self.transactions:04}"


def at_most(most: int, reply: str = "452 4.5.3 Error: too many recipients") -> Rule:
    return lambda _recipient, count: reply if count >= most else None


@asynccontextmanager
async def choosy_server(server: ChoosyServer) -> AsyncIterator[SmtpProvider]:
    async with (
        listening(server.serve) as port,
        closing(SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", port, "none")))) as provider,
    ):
        yield provider
