"""Opening an SMTP connection: TCP, TLS that is verified or refused, EHLO, AUTH. Every failure here is definite.

aiosmtplib does these steps; we order them and translate what it raises into `NotConnected` (try again later) or
`ProviderFault` (a person must mend something).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import aiosmtplib

from dispatcher.config import Settings
from dispatcher.domain.outcome import Concern, Deferred, Reason
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.scrub import scrub
from dispatcher.providers.smtp_conversation import Conversation, conversation_over
from dispatcher.providers.smtp_replies import Phase, refusal, reply_of
from dispatcher.setting_values import SmtpServer
from dispatcher.trust import client_context

NAME: Final = "smtp"

_BAD_TLS: Final = "Mend the server's certificate, or name the authority that signed it in DISPATCHER_CA_FILE."
_BAD_LOGIN: Final = "Check the user and password in DISPATCHER_SMTP_URL."
_BAD_SECURITY: Final = "Check DISPATCHER_SMTP_URL: smtp:// is STARTTLS, smtps:// is TLS from the first byte."


@dataclass(frozen=True, slots=True)
class SmtpOptions:
    """What the adapter needs to know.

    Attributes:
        connections: Connections kept, and so the emails on the wire at once.
        emails_per_connection: After so many a connection is renewed.
        ca_file: Certificates to trust instead of the system's.
        trusted_idle_seconds: A connection that was idle for longer is probed (RSET) before it carries an email: servers
            and firewalls drop idle ones silently.
    """

    server: SmtpServer
    connections: int = 8
    emails_per_connection: int = 100
    ca_file: Path | None = None
    trusted_idle_seconds: float = 5.0

    @classmethod
    def from_settings(cls, settings: Settings) -> SmtpOptions:
        """The options that the settings give.

        Raises:
            ConfigurationError: no server is named.
        """
        if settings.smtp_url is None:
            raise ConfigurationError(["DISPATCHER_SMTP_URL is not set: set it, like smtp://host:587."])
        return cls(settings.smtp_url, settings.smtp_connections, settings.smtp_emails_per_connection, settings.ca_file)


class NotConnected(Exception):
    """No connection could be opened; nothing of any email left.

    Attributes:
        outcome: What that means for the email in hand.
        is_full: The server says that it has no room for one more: 421.
    """

    def __init__(self, outcome: Deferred) -> None:
        super().__init__(outcome.detail)
        self.outcome = replace(outcome, known_concern=Concern.PROVIDER)
        self.is_full = (outcome.code or "").startswith("421")


@dataclass(slots=True)
class Connection:
    """An open connection, ready for MAIL.

    Attributes:
        size_limit: The largest email that the server takes, in octets; 0 if it did not say (RFC 1870).
        emails: How many it has carried.
        idle_since: When it was given back, in the loop's `time()`.
        needs_reset: A transaction was left half done: RSET comes first.
    """

    conversation: Conversation
    has_size: bool
    size_limit: int
    has_smtputf8: bool
    has_pipelining: bool
    emails: int = 0
    idle_since: float = 0.0
    needs_reset: bool = False


def tls_context(options: SmtpOptions) -> ssl.SSLContext | None:
    """A context that verifies certificate and host name; None where the server is reached without TLS."""
    if options.server.security == "none":
        return None
    return client_context(options.ca_file)


async def open_connection(options: SmtpOptions, context: ssl.SSLContext | None) -> Connection:
    """A connection on which the server expects MAIL; takes as long as the server likes: the caller sets a deadline.

    Raises:
        NotConnected: not now.
        ProviderFault: not before somebody mends it: TLS missing or not trusted, credentials refused.
    """
    client = aiosmtplib.SMTP(
        hostname=options.server.host,
        port=options.server.port,
        timeout=None,
        use_tls=options.server.security == "tls",
        start_tls=False,
        tls_context=context,
        local_hostname=_our_name(None),  # or it would ask a name server
    )
    try:
        await _translated(client.connect, _connect_failure)
        client.local_hostname = _our_name(client.transport)
        if options.server.security == "starttls":
            await _start_tls(client)
        await _translated(lambda: _greet(client), _connect_failure)
        if options.server.username:
            await _log_in(client, options.server)
        return _take_over(client)
    except BaseException:
        client.close()
        raise


def _our_name(transport: asyncio.BaseTransport | None) -> str:
    """What we call ourselves in EHLO: a full name, else the address that we come from (RFC 5321, section 4.1.4)."""
    name = socket.gethostname()
    if "." in name.strip(".") and name.isascii():
        return name
    found = transport.get_extra_info("sockname") if transport is not None else None
    address = str(found[0]).partition("%")[0] if found else "127.0.0.1"
    return f"[IPv6:{address}]" if ":" in address else f"[{address}]"


async def _greet(client: aiosmtplib.SMTP) -> None:
    try:
        await client.ehlo()
    except aiosmtplib.SMTPHeloError as error:
        if error.code < 500 or not client.is_connected:
            raise
        # A server from before 1995; it will offer no extension.
        await client.helo()


async def _start_tls(client: aiosmtplib.SMTP) -> None:
    await _translated(lambda: _greet(client), _connect_failure)
    if not client.supports_extension("starttls"):
        raise ProviderFault(
            NAME, "the SMTP server does not offer STARTTLS, and without it nothing is sent.", remedy=_BAD_SECURITY
        )
    await _translated(client.starttls, _start_tls_failure)


async def _log_in(client: aiosmtplib.SMTP, server: SmtpServer) -> None:
    methods = {"plain": client.auth_plain, "login": client.auth_login, "cram-md5": client.auth_crammd5}
    offered = [method for name, method in methods.items() if name in client.server_auth_methods]
    if not offered:
        raise ProviderFault(
            NAME, "the SMTP server offers no way to sign in (AUTH PLAIN, LOGIN or CRAM-MD5).", remedy=_BAD_SECURITY
        )
    # One method, tried once: every further try with the same password is a step towards a locked account.
    await _translated(lambda: offered[0](server.username, server.password), _log_in_failure)


def _take_over(client: aiosmtplib.SMTP) -> Connection:
    if not client.is_connected or client.transport is None:
        raise NotConnected(Deferred(Reason.CONNECTION_FAILED, "the server closed the connection while connecting"))
    extensions = client.esmtp_extensions
    limit = extensions.get("size", "")
    connection = Connection(
        conversation_over(client.transport),
        has_size="size" in extensions,
        size_limit=int(limit) if limit.isascii() and limit.isdigit() else 0,
        has_smtputf8="smtputf8" in extensions and "8bitmime" in extensions,
        has_pipelining="pipelining" in extensions,
    )
    # The client keeps no hold on what it opened: closing it must not close the connection.
    client.protocol = client.transport = None
    return connection


async def _translated(step: Callable[[], Awaitable[object]], translate: Callable[[Exception], Exception]) -> None:
    """One of aiosmtplib's steps, its exceptions translated; the one border that they cross."""
    try:
        await step()
    except (aiosmtplib.SMTPException, OSError, UnicodeError) as error:
        raise translate(error) from error


def _connect_failure(error: Exception) -> Exception:
    cause = error.__cause__ if isinstance(error, aiosmtplib.SMTPConnectError) and error.__cause__ else error
    if isinstance(cause, aiosmtplib.SMTPResponseException):
        return _unwilling(cause)
    if isinstance(cause, ssl.SSLError):
        return _tls_failure(cause)
    if isinstance(cause, UnicodeError):
        return ProviderFault(NAME, "the SMTP server's host name is not a name.", remedy=_BAD_SECURITY)
    return _unreached(cause)


def _start_tls_failure(error: Exception) -> Exception:
    if isinstance(error, aiosmtplib.SMTPResponseException) and error.code >= 500:
        return ProviderFault(NAME, f"the SMTP server refused STARTTLS ({error.code}).", remedy=_BAD_SECURITY)
    return _connect_failure(error)


def _log_in_failure(error: Exception) -> Exception:
    if not isinstance(error, aiosmtplib.SMTPAuthenticationError) or not 400 <= error.code < 600:
        return _connect_failure(error)
    # The server's words may repeat the user's name, and whatever else we sent it: its code says enough.
    codes = reply_of(error.code, error.message).codes
    if error.code >= 500:
        return ProviderFault(NAME, f"the SMTP server refused the user name and password ({codes}).", remedy=_BAD_LOGIN)
    return NotConnected(Deferred(Reason.SERVER_ERROR, "the server refused to log us in for now", codes))


def _tls_failure(error: ssl.SSLError) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        words = scrub(error.verify_message)
        return ProviderFault(NAME, f"the SMTP server's certificate cannot be trusted: {words}.", remedy=_BAD_TLS)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return _unreached(error)
    return ProviderFault(NAME, f"TLS with the SMTP server failed: {error.reason}.", remedy=_BAD_SECURITY)


def _unwilling(error: aiosmtplib.SMTPResponseException) -> NotConnected:
    """The server answered, but not with what opens a connection: never the email's fault, whatever the code."""
    if not 200 <= error.code < 600:
        return NotConnected(Deferred(Reason.SERVER_ERROR, "the server sent a line that is no reply while connecting"))
    reply = reply_of(error.code, error.message)
    judged = refusal(reply, Phase.CONNECTING)
    if isinstance(judged, Deferred):
        return NotConnected(judged)
    return NotConnected(Deferred(Reason.SERVER_ERROR, scrub(reply.text) or None, reply.codes))


def _unreached(error: BaseException) -> NotConnected:
    words = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return NotConnected(Deferred(Reason.CONNECTION_FAILED, f"no connection to the server: {scrub(words)}"))
