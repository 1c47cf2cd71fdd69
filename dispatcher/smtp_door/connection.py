"""One client's connection: TLS, login, and the commands of SMTP (RFC 5321, RFC 6409), which aiosmtpd reads."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from dispatcher.admission.access import Caller
from dispatcher.admission.problems import Problem
from dispatcher.domain.address import parse_address
from dispatcher.domain.api_key import Secret
from dispatcher.errors import InvalidEmail
from dispatcher.smtp_door.content import Content
from dispatcher.smtp_door.door import Door, Refused
from dispatcher.smtp_door.guard import network_of
from dispatcher.smtp_door.replies import OF_LIBRARY
from dispatcher.telemetry import metrics

HANDSHAKE_SECONDS: Final = 15.0
MOST_FAILED_LOGINS: Final = 3
"""The most failed logins of one connection."""
MOST_REFUSED_RECIPIENTS: Final = 100
MAX_OCTETS_BEFORE_LOGIN: Final = 8192
MAX_COMMAND_OCTETS: Final = 1000
LINGER_SECONDS: Final = 2.0
"""How long a connection that this server closes discards what the client still sends. If the server closed at once, a
TCP reset could destroy the last reply."""
_PATH: Final = re.compile(r"<([^<>\s]*)>(?: +(.*))?")
_MEMORY_PER_OCTET: Final = 2
"""The content, and the email that is made of it."""


class Hooks:
    """What aiosmtpd calls for single commands."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def handle_EHLO(
        self, _server: SMTP, session: Session, _envelope: Envelope, hostname: str, lines: list[str]
    ) -> list[str]:
        session.host_name = hostname
        return [*lines[:-1], "250-PIPELINING", "250 ENHANCEDSTATUSCODES"]

    async def handle_HELO(self, server: Connection, session: Session, _envelope: Envelope, hostname: str) -> str:
        session.host_name = hostname
        return f"250 {server.hostname}"

    async def handle_MAIL(
        self, server: Connection, _session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if not address.strip("<>"):
            return (
                "550 5.7.1 This server sends no bounces and other messages without a sender. Use MAIL FROM with an "
                "address."
            )
        if fault := _fault(address):
            return f"553 5.1.7 The sender {fault}."
        try:
            self._door.begin_message(server.caller)
        except Refused as refused:
            if str(refused).startswith("421"):
                server.close(str(refused))
            return str(refused)
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 2.1.0 OK"

    async def handle_RCPT(
        self, server: Connection, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        if fault := _fault(address):
            server.refused_recipients += 1
            if server.refused_recipients >= MOST_REFUSED_RECIPIENTS:
                server.close("421 4.7.0 Too many recipients are not valid. Connect again.")
            return f"553 5.1.3 The recipient {fault}."
        most = self._door.settings.api_max_recipients
        if len(envelope.rcpt_tos) >= most and address not in envelope.rcpt_tos:
            return f"452 4.5.3 A message has at most {most:,} recipients here. Send it again to the others."
        if address not in envelope.rcpt_tos:
            envelope.rcpt_tos.append(address)
        return "250 2.1.5 OK"

    async def handle_exception(self, error: Exception) -> str:
        if isinstance(error, ValueError):  # of the reader: a line is longer than its limit
            return "500 5.5.2 The line is too long."
        return self._door.reply_of(error)


class Connection(SMTP):
    """The protocol of one client's connection."""

    AuthLoginUsernameChallenge = "Username:"
    AuthLoginPasswordChallenge = "Password:"

    def __init__(
        self,
        door: Door,
        hooks: Hooks,
        tls: ssl.SSLContext | None,
        *,
        hostname: str,
        on_open: Callable[[Connection], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        """`tls`: None only on the loopback."""
        settings = door.settings
        self._is_implicit = settings.submission_tls == "implicit"
        super().__init__(
            hooks,
            data_size_limit=settings.submission_max_bytes,
            enable_SMTPUTF8=True,
            hostname=hostname,
            ident="ESMTP Email Dispatcher",
            tls_context=tls,
            require_starttls=tls is not None,
            timeout=settings.submission_idle_seconds,
            auth_required=True,
            command_call_limit={"*": 100, **dict.fromkeys(("MAIL", "RCPT", "DATA", "RSET", "NOOP"), 1 << 60)},
            loop=asyncio.get_running_loop(),
        )
        self._auth_require_tls = tls is not None
        # aiosmtpd changes this table of the class, for all connections, with each EHLO.
        self.command_size_limits = defaultdict(lambda: MAX_COMMAND_OCTETS)
        self.command_size_limit = MAX_COMMAND_OCTETS
        self._door = door
        self._on_open, self._on_closed = on_open, on_closed
        self._address: str | None = None  # while the guard counts this connection
        self._caller: Caller | None = None
        self._failed_logins = 0
        self.refused_recipients = 0
        self._octets_before_login = 0
        self._held = b""  # a CR at the end of what has arrived
        self._content: Content | None = None
        self._memory = 0
        self.is_busy = False  # a message is being transmitted or stored
        self._is_closing = False
        self._is_draining = False
        self._is_in_handshake = False

    @property
    def caller(self) -> Caller:
        assert self._caller is not None
        return self._caller

    # asyncio calls the following methods.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._is_implicit:
            # asyncio has encrypted the connection already, and `accept_encrypted` has counted it.
            super().connection_made(transport)
            self._note_encryption(transport)
        elif reply := self.enter(transport.get_extra_info("peername")):
            self.close(reply)
        else:
            super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.leave()
        if self._handler_coroutine is not None:
            super().connection_lost(error)

    def eof_received(self) -> bool | None:
        return super().eof_received() if self._handler_coroutine is not None else False

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        data = self._held + data
        self._held = b"\r" if data.endswith(b"\r") else b""
        if self._held:
            data = data[:-1]
        lines = data.count(b"\r\n")
        if data.count(b"\r") != lines or data.count(b"\n") != lines:
            # RFC 5321, section 2.3.8. Servers that accept them differ in where a message ends (SMTP smuggling).
            self.close("554 5.5.2 A CR without LF, or an LF without CR. End each line with CRLF.")
            return
        if self._caller is None:
            self._octets_before_login += len(data)
            if self._octets_before_login > MAX_OCTETS_BEFORE_LOGIN:
                self.close("421 4.7.0 Too many commands without a login. Log in with an API key.")
                return
        if self._content is not None and not self._content.ended.done():
            data = self._content.feed(data)
        if data:
            super().data_received(data)

    # What the server calls.

    def enter(self, peer: Any) -> str | None:
        """Counts this connection. Returns the reply, and counts nothing, if there are too many."""
        address = network_of((peer or ("",))[0])
        reply = self._door.guard.enter(address)
        metrics.SUBMISSION_CONNECTIONS.add(1, "refused" if reply else "accepted")
        if reply is None:
            self._address = address
            self._on_open(self)
        return reply

    def leave(self) -> None:
        """Frees what this connection uses. Idempotent."""
        if self._address is not None:
            self._door.guard.leave(self._address)
            self._address = None
            self._release_memory()
            self._log_out()
            self._on_closed(self)

    def drain(self) -> None:
        """Closes the connection: now, or after the message in progress."""
        self._is_draining = True
        if not self.is_busy:
            self.close("421 4.3.2 The server stops. Connect again.")

    def close(self, reply: str) -> None:
        """Sends a last reply, and closes the connection soon."""
        if self._is_closing or self.transport is None:
            return
        self._is_closing = True
        transport: Any = self.transport
        if self._is_in_handshake:
            self._abort(transport)
            return
        transport.write(reply.encode() + b"\r\n")
        transport.resume_reading()
        self.loop.call_later(LINGER_SECONDS, transport.close)
        self.loop.call_later(2 * LINGER_SECONDS, self._abort, transport)

    def _abort(self, transport: Any) -> None:
        """Closes the connection at once. uvloop reports a lost connection only after the handshake of TLS."""
        transport.abort()
        if self._handler_coroutine is not None:
            self._handler_coroutine.cancel()
        self.leave()

    # aiosmtpd calls the following methods.

    async def push(self, status: Any) -> None:
        if self._is_closing:
            return
        await super().push(OF_LIBRARY.get(status, status))

    def _reset_timeout(self, duration: float | None = None) -> None:
        # Before the login, commands do not extend the time: with NOOP, a client could stay for days.
        if self._caller is not None or self._timeout_handle is None:
            super()._reset_timeout(duration)

    def _timeout_cb(self) -> None:
        doing = "with this message" if self._content else "between two commands" if self._caller else "to log in"
        self.close(f"421 4.4.2 The client took too long {doing}. Connect again.")

    async def _encrypt(self) -> bool:
        """Starts TLS; False if that failed, and the connection is closed."""
        plain: Any = self.transport
        assert self.tls_context is not None
        self._is_in_handshake = True
        try:
            encrypted: Any = await self.loop.start_tls(
                plain, self, self.tls_context, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError:
            encrypted = None
        if encrypted is None:
            self._abort(plain)
            return False
        self._is_in_handshake = False
        reader: Any = self._reader
        writer: Any = self._writer
        protocol: Any = self
        self.transport = reader._transport = writer._transport = protocol._transport = encrypted
        protocol._over_ssl = True
        protocol._set_rset_state()
        self.session = self._create_session()
        self._note_encryption(encrypted)
        return True

    def _note_encryption(self, transport: Any) -> None:
        self._tls_protocol = transport  # aiosmtpd only asks whether it is set
        assert self.session is not None
        self.session.ssl = {}

    async def smtp_STARTTLS(self, arg: str) -> None:
        if self._tls_protocol or not self.tls_context:
            await self.push("503 5.5.1 The connection is encrypted already, or this server has no TLS.")
        elif arg:
            await self.push("501 5.5.4 Write STARTTLS alone.")
        elif self._is_ahead():
            self.close("554 5.5.1 The client sent more after STARTTLS. Wait for the reply.")
        else:
            await self.push("220 2.0.0 Ready to start TLS")
            if not await self._encrypt():
                raise asyncio.CancelledError

    async def smtp_AUTH(self, arg: str) -> None:
        if self._is_closing:
            return
        mechanism, _, rest = (arg or "").partition(" ")
        await super().smtp_AUTH(f"{mechanism.upper()} {rest}".strip())

    async def auth_PLAIN(self, _: Any, args: list[str]) -> AuthResult:
        return await self._log_in(await super().auth_PLAIN(_, args))

    async def auth_LOGIN(self, _: Any, args: list[str]) -> AuthResult:
        return await self._log_in(await super().auth_LOGIN(_, args))

    def _authenticate(self, _mechanism: str, auth_data: Any) -> AuthResult:
        return AuthResult(success=True, auth_data=auth_data)  # `_log_in` looks for the key

    async def _log_in(self, given: AuthResult) -> AuthResult:
        """The result of a login. The user name may be any text, because the key has its own id."""
        if not given.success or not isinstance(given.auth_data, LoginPassword) or self._address is None:
            return given
        address, guard = self._address, self._door.guard
        secret = Secret.parse(given.auth_data.password.decode("ascii", "replace"))
        try:
            self._caller = await self._door.log_in(secret, may_ask_database=not guard.is_blocked(address))
        except Refused as refused:
            reply = str(refused)
            self._door.refusals.count("unauthorized")
            if reply.startswith("535"):
                self._failed_logins += 1
                is_last = self._failed_logins >= MOST_FAILED_LOGINS or guard.is_blocked(address)
                await asyncio.sleep(guard.fail(address))
                if is_last:
                    self.close(f"421 4.7.0 Too many failed logins.{reply[9:]}")
            return AuthResult(success=False, handled=False, message=reply)
        self._reset_timeout()
        return AuthResult(success=True, auth_data=given.auth_data.login)

    def _log_out(self) -> None:
        if self._caller is not None:
            self._door.sessions_per_key.release(self._caller.name)
            self._caller = None

    def _getaddr(self, arg: str) -> tuple[str | None, str | None]:
        found = _PATH.fullmatch(arg)
        return (found[1] or "<>", found[2] or "") if found else (None, None)

    async def smtp_VRFY(self, _arg: str) -> None:
        await self.push("252 2.5.1 This server does not verify addresses. Send a message instead.")

    async def smtp_HELP(self, _arg: str) -> None:
        await self.push("214 2.0.0 Log in with AUTH PLAIN or LOGIN, an API key as the password. See docs/smtp.md.")

    async def smtp_DATA(self, arg: str) -> None:
        if await self.check_helo_needed() or await self.check_auth_needed("DATA"):
            return
        envelope = self.envelope
        assert envelope is not None
        if not envelope.rcpt_tos or not envelope.mail_from:
            await self.push("503 5.5.1 The message has no valid recipient. Send RCPT first.")
        elif arg:
            await self.push("501 5.5.4 Write DATA alone.")
        elif self._is_ahead():
            self.close("554 5.5.1 The client sent more after DATA. Wait for the reply.")
        else:
            self.is_busy = True
            try:
                await self.push(await self._receive(envelope.mail_from, envelope.rcpt_tos))
            finally:
                self.is_busy = False
                self._release_memory()
                self._content = None
                self.envelope = self._create_envelope()
                if self.transport is not None:
                    self._reset_timeout()
            if self._is_draining:
                self.close("421 4.3.2 The server stops. Connect again.")

    async def _receive(self, sender: str, recipients: list[str]) -> str:
        """Receives the content, and returns the reply to it."""
        content = self._content = Content(self._door.settings.submission_max_bytes, self._charge)
        self._reset_timeout(self._door.settings.submission_data_seconds)
        await self.push("354 End data with <CR><LF>.<CR><LF>")
        await content.ended
        if self._timeout_handle is not None:
            self._timeout_handle.cancel()  # from here on, the client waits for us
        if content.refusal is not None:
            refusal = content.refusal
            if isinstance(refusal, Problem):
                return self._door.reply_of(refusal)
            self._door.refusals.count("body-too-large")
            return refusal
        return await self._door.accept(self.caller, sender, recipients, content.take())

    def _charge(self, octets: int) -> None:
        self._door.memory.acquire(self.caller.name, octets * _MEMORY_PER_OCTET)
        self._memory += octets * _MEMORY_PER_OCTET

    def _release_memory(self) -> None:
        if self._memory:
            self._door.memory.release(self.caller.name, self._memory)
            self._memory = 0

    def _is_ahead(self) -> bool:
        """Whether the client has sent more than the current command."""
        reader: Any = self._reader
        return bool(reader._buffer or self._held)


def _fault(address: str) -> str | None:
    """Why an address of the envelope is not valid; None if it is."""
    try:
        parse_address(address)
    except (ValueError, InvalidEmail) as error:
        return str(error)
    return None
