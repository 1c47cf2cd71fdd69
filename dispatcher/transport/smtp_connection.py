"""Opens an SMTP connection: TCP, verified TLS, EHLO, AUTH. If that fails, no email was sent.

A failure is `NotConnected` (a later attempt might succeed) or `ProviderFault` (an operator must correct something).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dispatcher.config.values import SmtpServer
from dispatcher.domain.outcome import Concern, Deferred, Reason
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.transport.smtp_protocol import InvalidReply, ServerClosing, SmtpConnectionLost, SmtpProtocol
from dispatcher.transport.smtp_replies import SmtpPhase, SmtpReply, refusal
from dispatcher.transport.tcp import connect
from dispatcher.transport.tls_faults import tls_fault

NAME: Final = "smtp"

MAX_SIZE_DIGITS: Final = 20
"""The maximum number of digits of SIZE (RFC 1870, section 4). Python refuses to convert thousands of digits."""
_READY: Final = 220
_DONE: Final = 250
_GO_ON: Final = 334
_SIGNED_IN: Final = 235

_BAD_LOGIN: Final = "Check the user and password in DISPATCHER_SMTP_URL."
_URL: Final = "DISPATCHER_SMTP_URL (smtp:// uses STARTTLS, smtps:// uses TLS from the first byte)"
_BAD_SECURITY: Final = f"Check {_URL}."


class NotConnected(Exception):
    """No connection could be opened; no email was sent.

    Attributes:
        outcome: The outcome for the email that needed the connection.
        is_full: Whether the server answered 421, because it accepts no further connections now.
    """

    def __init__(self, outcome: Deferred) -> None:
        super().__init__(outcome.detail)
        self.outcome = replace(outcome, known_concern=Concern.PROVIDER)
        self.is_full = (outcome.code or "").startswith("421")


@dataclass(slots=True)
class SmtpConnection:
    """An open connection, ready for MAIL.

    Attributes:
        size_limit: The largest email that the server accepts, in octets; 0 if the server announced no limit (RFC 1870).
        emails: How many emails were sent over the connection.
        idle_since: When the connection was returned to the pool, in the loop's `time()`.
        needs_reset: Whether a transaction was not completed, so that the next transaction must begin with RSET.
    """

    protocol: SmtpProtocol
    has_size: bool
    size_limit: int
    has_smtputf8: bool
    has_pipelining: bool
    emails: int = 0
    idle_since: float = 0.0
    needs_reset: bool = False


async def open_connection(server: SmtpServer, context: ssl.SSLContext | None) -> SmtpConnection:
    """Opens a connection that is ready for MAIL. Has no time limit, so the caller must set one.

    Args:
        context: The TLS context, which verifies certificate and host name; None for a server without TLS.

    Raises:
        NotConnected: A later attempt might succeed.
        ProviderFault: An operator must correct something: TLS is missing or untrusted, or the login was refused.
    """
    protocol = await _connected(server, context)
    try:
        extensions = await _negotiated(protocol, server, context)
        # Read surplus replies now. Otherwise, a surplus reply would later count as the reply to MAIL.
        await protocol.read_available()
        protocol.check()
    except SmtpConnectionLost as broke:
        protocol.abort()
        raise _lost_while_opening(broke) from broke
    except BaseException:
        protocol.abort()
        raise
    size = extensions.get("size", "")
    return SmtpConnection(
        protocol,
        has_size="size" in extensions,
        size_limit=int(size) if size.isascii() and size.isdigit() and len(size) <= MAX_SIZE_DIGITS else 0,
        has_smtputf8="smtputf8" in extensions and "8bitmime" in extensions,
        has_pipelining="pipelining" in extensions,
    )


async def _connected(server: SmtpServer, context: ssl.SSLContext | None) -> SmtpProtocol:
    tls = context if server.security == "tls" else None
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(
            SmtpProtocol,
            sock=await connect(server.host, server.port),
            ssl=tls,
            server_hostname=server.host if tls else None,
        )
    except (OSError, UnicodeError) as error:
        raise _connect_failure(error) from error
    return protocol


async def _negotiated(protocol: SmtpProtocol, server: SmtpServer, context: ssl.SSLContext | None) -> Mapping[str, str]:
    """Reads the greeting, sends EHLO, starts TLS if configured, and logs in if configured.

    Returns the server's extensions as `_extensions_of` does.
    """
    greeting = await protocol.reply()
    if greeting.code != _READY:
        raise _refused_to_open(greeting)
    extensions = await _say_ehlo(protocol)
    if server.security == "starttls":
        assert context is not None
        await _start_tls(protocol, extensions, server, context)
        extensions = await _say_ehlo(protocol)
    if server.username:
        await _log_in(protocol, extensions, server)
    return extensions


async def _command(protocol: SmtpProtocol, command: str) -> SmtpReply:
    """Sends a command and returns the reply.

    Raises SmtpConnectionLost if a reply arrived before the command was sent.
    """
    await protocol.read_available()
    protocol.check()
    protocol.write(f"{command}\r\n".encode(), 1)
    return await protocol.reply()


async def _say_ehlo(protocol: SmtpProtocol) -> Mapping[str, str]:
    name = _our_name(protocol.address)
    reply = await _command(protocol, f"EHLO {name}")
    if reply.code == _DONE:
        return _extensions_of(reply)
    if reply.is_permanent:
        # The server refuses EHLO, so it may predate ESMTP (1995): try HELO.
        reply = await _command(protocol, f"HELO {name}")
    if reply.code != _DONE:
        raise _refused_to_open(reply)
    return {}


def _extensions_of(reply: SmtpReply) -> Mapping[str, str]:
    """The extensions in a reply to EHLO. The keys are keywords in lower case, the values are the parameters.

    For example, `SIZE 10240000` becomes `{"size": "10240000"}`.
    """
    extensions: dict[str, str] = {}
    for line in reply.text.split("\n")[1:]:
        keyword, _, parameters = line.strip().partition(" ")
        if keyword.lower().startswith("auth="):  # the form that servers used before RFC 2554
            keyword, parameters = "auth", f"{keyword[5:]} {parameters}"
        keyword = keyword.lower()
        extensions[keyword] = (
            f"{extensions['auth']} {parameters}" if keyword == "auth" and "auth" in extensions else parameters
        )
    return extensions


def _our_name(address: str) -> str:
    """Our name in EHLO: the host name if it has a domain, otherwise the local IP address (RFC 5321, section 4.1.4)."""
    name = socket.gethostname()
    if "." in name.strip(".") and name.isascii():
        return name
    return f"[IPv6:{address}]" if ":" in address else f"[{address}]"


async def _start_tls(
    protocol: SmtpProtocol, extensions: Mapping[str, str], server: SmtpServer, context: ssl.SSLContext
) -> None:
    if "starttls" not in extensions:
        raise ProviderFault(
            NAME, "the SMTP server does not offer STARTTLS, which smtp:// requires.", remedy=_BAD_SECURITY
        )
    reply = await _command(protocol, "STARTTLS")
    if reply.is_permanent:
        raise ProviderFault(NAME, f"the SMTP server refused STARTTLS ({reply.code}).", remedy=_BAD_SECURITY)
    if reply.code != _READY:
        raise _refused_to_open(reply)
    try:
        await protocol.start_tls(context, server.host)
    except OSError as error:
        raise _connect_failure(error) from error


async def _log_in(protocol: SmtpProtocol, extensions: Mapping[str, str], server: SmtpServer) -> None:
    methods = {"plain": _plain, "login": _login, "cram-md5": _cram_md5}
    offered = extensions.get("auth", "").lower().split()
    # Try only one method, and only once: more attempts with the same password could lock the account.
    method = next((method for name, method in methods.items() if name in offered), None)
    if method is None:
        raise ProviderFault(
            NAME,
            "the SMTP server offers no login that we support (AUTH PLAIN, LOGIN or CRAM-MD5).",
            remedy=_BAD_SECURITY,
        )
    reply = await method(protocol, server.username.encode(), server.password.encode())
    if reply.code != _SIGNED_IN:
        raise _log_in_failure(reply)


async def _plain(protocol: SmtpProtocol, user: bytes, password: bytes) -> SmtpReply:
    secret = _base64(b"\0" + user + b"\0" + password)
    return await _command(protocol, f"AUTH PLAIN {secret}")


async def _login(protocol: SmtpProtocol, user: bytes, password: bytes) -> SmtpReply:
    reply = await _command(protocol, f"AUTH LOGIN {_base64(user)}")
    return await _command(protocol, _base64(password)) if reply.code == _GO_ON else reply


async def _cram_md5(protocol: SmtpProtocol, user: bytes, password: bytes) -> SmtpReply:
    """Logs in with AUTH CRAM-MD5 (RFC 2195), and returns the server's last reply."""
    reply = await _command(protocol, "AUTH CRAM-MD5")
    if reply.code != _GO_ON:
        return reply
    try:
        challenge = base64.b64decode(reply.text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidReply("the server's CRAM-MD5 challenge is not Base64") from None
    digest = hmac.digest(password, challenge, "md5").hex()
    return await _command(protocol, _base64(user + b" " + digest.encode()))


def _base64(octets: bytes) -> str:
    return base64.b64encode(octets).decode()


def _log_in_failure(reply: SmtpReply) -> Exception:
    # The reply's text is left out, because it may repeat the user name or the password. The code is enough.
    if reply.is_permanent:
        words = f"the SMTP server refused the user name and password ({reply.codes})."
        return ProviderFault(NAME, words, remedy=_BAD_LOGIN)
    words = "the server temporarily refused the login" if reply.is_transient else "unexpected reply to AUTH"
    return NotConnected(Deferred(Reason.SERVER_ERROR, words, reply.codes))


def _connect_failure(error: Exception) -> Exception:
    if isinstance(error, UnicodeError):
        return ProviderFault(NAME, "the SMTP server's host name is not valid.", remedy=_BAD_SECURITY)
    if fault := tls_fault(NAME, "the SMTP server", error, url=_URL):
        return fault
    words = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return NotConnected(Deferred(Reason.CONNECTION_FAILED, f"no connection to the server: {scrub(words)}"))


def _lost_while_opening(broke: SmtpConnectionLost) -> NotConnected:
    if isinstance(broke, ServerClosing):
        # The reply's text is left out, because it may repeat our last command, even the password.
        return NotConnected(replace(_refused_to_open(broke.reply).outcome, detail=f"{broke} {SmtpPhase.CONNECTING}"))
    reason = Reason.SERVER_ERROR if isinstance(broke, InvalidReply) else Reason.CONNECTION_FAILED
    return NotConnected(Deferred(reason, f"{broke} {SmtpPhase.CONNECTING}"))


def _refused_to_open(reply: SmtpReply) -> NotConnected:
    """The exception for a reply that refuses the connection.

    Its outcome is always `Deferred`, even for a permanent refusal (5xx), because the email is not the cause.
    """
    judged = refusal(reply, SmtpPhase.CONNECTING)
    if isinstance(judged, Deferred):
        return NotConnected(judged)
    return NotConnected(Deferred(Reason.SERVER_ERROR, scrub(reply.text) or None, reply.codes))
