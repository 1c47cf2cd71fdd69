"""The server's side of one SMTP connection, with injected faults. See `smtp_sink`.

Uses an asyncio protocol, which needs 50 µs of CPU per email, instead of aiosmtpd, which needs 270 µs. In a benchmark,
the server and the dispatcher share two cores, so a slow server would distort the result. The tests also use aiosmtpd,
as an independent check of our adapter.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from dispatcher.dev.recording_server import Session
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step

DRIP_SECONDS: Final = 0.02
_PATH: Final = re.compile(r"(?:FROM|TO): ?<([^<>]*)>(.*)", re.IGNORECASE)
_GREYLISTED_TIMES: Final = 1
_MESSAGE_ID: Final = re.compile(rb"^message-id: *<([^@<>\r\n]+)@", re.IGNORECASE | re.MULTILINE)
_DEFERRALS: Final[Mapping[str, str]] = {
    "busy": "450 4.2.1 mailbox busy",
    "limited": "450 4.7.1 recipient rate limit exceeded",
    "unverified": "451 4.3.0 recipient address lookup failed",
    "full": "452 4.2.2 mailbox full",
    "closing": "421 4.3.2 closing the connection for",
    "hurried": "421 4.7.28 rate limit exceeded for",
}
"""The replies to recipients whose address begins with one of these words and a hyphen. A recipient gets the same reply
at every attempt."""


@dataclass(frozen=True, slots=True)
class Received:
    """One email that the server received, without dot-stuffing. `parameters` follow the address in MAIL FROM."""

    sender: str
    recipients: tuple[str, ...]
    content: bytes = field(repr=False)
    parameters: str = ""

    @property
    def email_id(self) -> str:
        """The part of the Message-ID before the @, which is the email's id; empty if there is no Message-ID."""
        found = _MESSAGE_ID.search(self.content)
        return found[1].decode("ascii", "replace") if found else ""


class Mailbox(Protocol):
    """The records and the behaviour that all sessions of a server share. See `SmtpSink` for the attributes."""

    behaviour: SmtpBehaviour
    greylisted: Counter[str]
    commands: Counter[str]
    sessions: set[SmtpSession]

    def accept(self, email: Received) -> str:
        """Records an accepted email. Returns the queue id with which the server replies."""
        ...

    def record_event(self, connection: int, event: str, email: Received | None = None, **fields: object) -> None:
        """Records an event of a connection (see `SmtpSink.record_event`), if the server records events."""
        ...


class SmtpSession(Session):
    def __init__(self, mailbox: Mailbox, number: int = 0) -> None:
        self._mailbox = mailbox
        self._number = number
        self._behaviour = mailbox.behaviour
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._searched = 0
        self._in_body = False
        self._has_begun = False
        self._is_waiting = False
        self._is_secure = self._behaviour.security == "tls"
        self._continue_login: Callable[[str], None] | None = None
        self._user = ""
        self._is_known = self._behaviour.login is None
        self._verbs: Mapping[str, Callable[[str], None]] = {
            "EHLO": self._ehlo, "HELO": self._helo, "STARTTLS": self._starttls, "AUTH": self._auth, "MAIL": self._mail,
            "RCPT": self._rcpt, "DATA": self._data, "RSET": self._rset, "NOOP": self._noop, "QUIT": self._quit,
        }  # fmt: skip
        self._forget()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets the client, or refuses it if too many are connected. asyncio calls this again after STARTTLS, which
        gets no greeting."""
        is_new = self not in self._mailbox.sessions
        self._transport = cast(asyncio.Transport, transport)
        self._mailbox.sessions.add(self)
        if is_new and 0 < self._behaviour.most_sessions < len(self._mailbox.sessions):
            self._send("421 4.7.0 too many connections")
            self._transport.close()
        elif is_new:
            self._reply("220 sink.test ESMTP", Step.CONNECT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._mailbox.sessions.discard(self)
        self._mailbox.record_event(self._number, "ended", by_us=self._closes, by_reset=exc is not None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._process_buffer()

    def freeze(self) -> None:
        """Stops replying, and keeps the connection open."""
        self._is_waiting = True

    def _process_buffer(self) -> None:
        while not self._is_waiting and not self._transport.is_closing():
            if not (self._read_body() if self._in_body else self._read_command()):
                return

    def _read_command(self) -> bool:
        line, found, rest = self._buffer.partition(b"\n")
        if not found:
            return False
        self._buffer = rest
        text = line.removesuffix(b"\r").decode("utf-8", "replace")
        if self._continue_login is not None:
            answer, self._continue_login = self._continue_login, None
            answer(text)
            return True
        verb, _, argument = text.partition(" ")
        verb = verb.upper()
        self._mailbox.commands[verb] += 1
        handler = self._verbs.get(verb)
        if handler is None:
            self._reply("500 5.5.2 unknown command")
        else:
            handler(argument)
        return True

    def _read_body(self) -> bool:
        if self._buffer and not self._has_begun:
            self._has_begun = True
            self._mailbox.record_event(self._number, "began")
        if self._buffer and self._act(Step.BODY):
            return False
        if self._buffer.startswith(b".\r\n"):
            end, after = 0, 3
        else:
            # The CRLF before the dot belongs to the content. The 5 octets of the end mark can arrive in two reads, so
            # the next search starts 4 octets before the end of the buffer.
            found = self._buffer.find(b"\r\n.\r\n", self._searched)
            if found < 0:
                self._searched = max(0, len(self._buffer) - 4)
                return False
            end, after = found + 2, found + 5
        content = bytes(self._buffer[:end])
        del self._buffer[:after]
        self._in_body = False
        self._finish(content)
        return True

    def _finish(self, content: bytes) -> None:
        fault = _content_fault(content) if self._behaviour.strict else ""
        if b"\r\n." in content or content.startswith(b"."):
            content = content.removeprefix(b".").replace(b"\r\n.", b"\r\n")
        email = Received(self._sender, tuple(self._recipients), content, self._parameters)
        self._mailbox.record_event(self._number, "read", email)
        self._forget()
        limit = self._behaviour.size_limit
        if 0 < limit < len(content):
            self._reply("552 5.3.4 message too big", Step.END)
        elif fault:
            self._reply(f"550 5.6.0 {fault}", Step.END)
        elif not self._act(Step.END):
            name = self._mailbox.accept(email)
            self._later(self._behaviour.latency_seconds, f"250 2.0.0 Ok: queued as {name}", Step.ANSWER)

    def _ehlo(self, _: str) -> None:
        self._forget()
        offers = ["sink.test", *self._behaviour.extensions, f"SIZE {self._behaviour.size_limit}"]
        if self._behaviour.security == "starttls" and not self._is_secure and self._behaviour.tls:
            offers.append("STARTTLS")
        elif self._behaviour.login:
            offers.append(f"AUTH {self._behaviour.login_methods}")
        last = offers.pop()
        self._reply("".join(f"250-{offer}\r\n" for offer in offers) + f"250 {last}", Step.EHLO)

    def _helo(self, _: str) -> None:
        self._forget()
        self._reply("250 sink.test")

    def _starttls(self, _: str) -> None:
        context = self._behaviour.tls
        if context is None or self._is_secure or self._behaviour.security != "starttls":
            self._reply("502 5.5.1 not offered", Step.STARTTLS)
        elif self._behaviour.script.get(Step.STARTTLS, "220").startswith("220"):
            self._is_waiting = True
            self._send(self._behaviour.script.get(Step.STARTTLS, "220 2.0.0 go ahead"))
            self._task = self._loop.create_task(self._secure(context))
        else:
            self._act(Step.STARTTLS)

    async def _secure(self, context: ssl.SSLContext) -> None:
        # RFC 3207, section 4.2: the server discards everything that it received before TLS.
        self._buffer.clear()
        try:
            transport = await self._loop.start_tls(self._transport, self, context, server_side=True)
        except (ssl.SSLError, OSError):
            self._transport.abort()
            return
        if transport is None:
            return
        self._transport = transport
        self._is_secure, self._is_waiting = True, False
        self._process_buffer()

    def _auth(self, argument: str) -> None:
        method, _, initial = argument.partition(" ")
        if self._act(Step.AUTH):
            return
        if method.upper() == "PLAIN":
            self._ask("", self._plain, initial)
        elif method.upper() == "LOGIN":
            self._ask("Username:", self._login_user, initial)
        elif method.upper() == "XOAUTH2":
            self._ask("", self._xoauth2, initial)
        else:
            self._reply("504 5.5.4 unknown method")

    def _ask(self, question: str, then: Callable[[str], None], initial: str = "") -> None:
        if initial:
            then(initial)
        else:
            self._continue_login = then
            self._reply(f"334 {base64.b64encode(question.encode()).decode()}")

    def _plain(self, answer: str) -> None:
        self._judge_login(*_decoded(answer).split("\0")[1:])

    def _xoauth2(self, answer: str) -> None:
        user, _, token = _decoded(answer).strip("\1").removeprefix("user=").partition("\1auth=Bearer ")
        if self._behaviour.login and user == self._behaviour.login[0] and token in self._behaviour.tokens:
            self._is_known = True
            self._reply("235 2.7.0 welcome")
        else:
            why = '{"status":"401","schemes":"bearer","scope":"https://mail.google.com/"}'
            self._ask(why, lambda _: self._reply(f"535 5.7.8 {user} {token} is not welcome"))

    def _login_user(self, answer: str) -> None:
        self._user = _decoded(answer)
        self._ask("Password:", lambda password: self._judge_login(self._user, _decoded(password)))

    def _judge_login(self, *login: str) -> None:
        wanted = "\0".join(self._behaviour.login or ())
        self._is_known = hmac.compare_digest("\0".join(login).encode(), wanted.encode())
        # Real servers repeat the user's name in this reply. The adapter must not repeat the name in its error.
        words = "235 2.7.0 welcome" if self._is_known else f"535 5.7.8 {login[0] if login else ''} is not welcome"
        self._reply(words)

    def _mail(self, argument: str) -> None:
        path = _PATH.fullmatch(argument)
        if self._behaviour.security == "starttls" and self._behaviour.tls and not self._is_secure:
            self._reply("530 5.7.0 STARTTLS first")
        elif not self._is_known:
            self._reply("530 5.7.0 authentication required")
        elif path is None:
            self._reply("501 5.5.4 syntax: MAIL FROM:<address>")
        elif not self._act(Step.MAIL):
            self._sender, self._parameters = path[1], path[2].strip()
            self._has_mail = True
            self._reply("250 2.1.0 Ok")

    def _rcpt(self, argument: str) -> None:
        path = _PATH.fullmatch(argument)
        if not self._has_mail:
            self._reply("503 5.5.1 need MAIL")
        elif path is None:
            self._reply("501 5.5.4 syntax: RCPT TO:<address>")
        elif not self._act(Step.RCPT):
            self._judge_recipient(path[1])

    def _judge_recipient(self, address: str) -> None:
        if 0 < self._behaviour.most_recipients <= len(self._recipients):
            self._reply("452 4.5.3 Error: too many recipients")
            return
        if address.startswith("refused"):
            self._reply(self._behaviour.refusal.format(address=address))
            return
        if reply := _DEFERRALS.get(address.partition("-")[0]):
            self._reply(f"{reply} <{address}>")
            if reply.startswith("421"):
                self._closes = True
                self._transport.close()
            return
        if address.startswith("greylisted") and self._mailbox.greylisted[address] < _GREYLISTED_TIMES:
            self._mailbox.greylisted[address] += 1
            self._reply(f"451 4.7.1 <{address}>: Recipient address rejected: Greylisted, try again")
            return
        self._recipients.append(address)
        self._later(self._behaviour.slow_seconds if address.startswith("slow") else 0, "250 2.1.5 Ok")

    def _data(self, _: str) -> None:
        if not self._recipients:
            self._reply("554 5.5.1 no valid recipients")
        elif not self._act(Step.DATA):
            self._in_body, self._has_begun, self._searched = True, False, 0
            self._reply("354 End data with <CR><LF>.<CR><LF>")

    def _rset(self, _: str) -> None:
        self._forget()
        self._reply("250 2.0.0 Ok", Step.RSET)

    def _noop(self, _: str) -> None:
        self._reply("250 2.0.0 Ok")

    def _quit(self, _: str) -> None:
        self._reply("221 2.0.0 Bye", Step.QUIT)
        self._transport.close()

    def _forget(self) -> None:
        """Forgets the sender and the recipients, so that the next MAIL can begin."""
        self._sender, self._parameters, self._has_mail = "", "", False
        self._recipients: list[str] = []

    def _later(self, seconds: float, line: str, step: Step | None = None) -> None:
        if not seconds:
            self._reply(line, step)
            return
        self._is_waiting = True
        self._loop.call_later(seconds, self._resume, line, step)

    def _resume(self, line: str, step: Step | None) -> None:
        self._is_waiting = False
        self._reply(line, step)
        self._process_buffer()

    def _reply(self, line: str, step: Step | None = None) -> None:
        if step is None or not self._act(step):
            self._send_reply(line, step)

    def _send_reply(self, line: str, step: Step | None) -> None:
        """Sends a reply. If it decides about an email's content, and the kernel takes it whole, records the event
        `answered`."""
        was_open = not self._transport.is_closing()
        self._send(line)
        if step in (Step.END, Step.ANSWER) and was_open and not self._transport.get_write_buffer_size():
            self._mailbox.record_event(self._number, "answered")

    def _send(self, line: str) -> None:
        if not self._transport.is_closing():
            self._transport.write(f"{line}\r\n".encode())

    def _act(self, step: Step) -> bool:
        """Does what `SmtpBehaviour.script` says for this step. Returns False if the normal reply must be sent."""
        wanted = self._behaviour.scripted(step)
        if wanted is None:
            return False
        self._closes = self._closes or wanted in (SmtpFault.CLOSE, SmtpFault.RESET)
        if wanted == SmtpFault.CLOSE:
            self._transport.close()
        elif wanted == SmtpFault.RESET:
            self._transport.abort()
        elif wanted in (SmtpFault.HANG, SmtpFault.FREEZE):
            self._is_waiting = True
            if wanted == SmtpFault.FREEZE:
                self._transport.pause_reading()
        elif wanted == SmtpFault.DRIP:
            self._is_waiting = True
            self._drip(b"250-")
        else:
            self._send_reply(wanted, step if wanted[:3].isdigit() else None)
            if wanted.startswith("421"):
                self._closes = True
                self._transport.close()
        return True

    def _drip(self, octets: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(octets[:1])
            self._loop.call_later(DRIP_SECONDS, self._drip, octets[1:] or b"x")


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _content_fault(content: bytes) -> str:
    """The fault by which the content violates RFC 5321, section 2.3.8, or RFC 5322, section 2.1.1; empty if none."""
    ends = content.count(b"\r\n")
    if content.count(b"\n") != ends or content.count(b"\r") != ends:
        return "bare CR or LF"
    if max(map(len, content.split(b"\r\n"))) > 999:
        return "line too long"
    return ""
