"""Opens an SMTP connection: TCP, verified TLS, EHLO, AUTH. If that fails, no email was sent.

A failure is `NotConnected` (a later attempt might succeed) or `ProviderFault` (an operator must correct something).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from dispatcher.config.values import SmtpServer, full_name_of_this_host
from dispatcher.domain.outcome import Concern, Deferred, Reason, Rejected
from dispatcher.domain.scrub import Secrets, scrub
from dispatcher.errors import ProviderFault
from dispatcher.transport.smtp_faults import BAD_NAME, BAD_SECURITY, NAME, NO_PASSWORDS, URL, remedy_for, setup_fault
from dispatcher.transport.smtp_login import log_in
from dispatcher.transport.smtp_protocol import InvalidReply, ServerClosing, SmtpConnectionLost, SmtpProtocol
from dispatcher.transport.smtp_replies import SmtpPhase, SmtpReply, refusal
from dispatcher.transport.tcp import connect
from dispatcher.transport.tls_faults import tls_fault

MAX_SIZE_DIGITS: Final = 20
"""The maximum number of digits of SIZE (RFC 1870, section 4). Python refuses to convert thousands of digits."""
_READY: Final = 220
_DONE: Final = 250
_SIGNED_IN: Final = 235


class NotConnected(Exception):
    """No connection could be opened; no email was sent. `outcome` is for the email that needed the connection."""

    def __init__(self, outcome: Deferred, remedy: str = "Check that the server is running and reachable.") -> None:
        super().__init__(outcome.detail)
        self.remedy = remedy
        self.outcome = replace(outcome, known_concern=Concern.PROVIDER)
        self.is_full = (outcome.code or "").startswith("421")  # the server accepts no further connections now


@dataclass(slots=True)
class SmtpConnection:
    """An open connection, ready for MAIL."""

    protocol: SmtpProtocol
    has_size: bool
    size_limit: int  # of an email, in octets; 0 if the server announced no limit (RFC 1870)
    has_smtputf8: bool
    has_8bitmime: bool
    has_pipelining: bool
    emails: int = 0  # how many were sent over the connection
    idle_since: float = 0.0  # when the connection was returned to the pool, in the loop's `time()`
    needs_reset: bool = False  # whether the next transaction must begin with RSET, because one was not completed


async def open_connection(server: SmtpServer, context: ssl.SSLContext | None, *, ehlo_name: str = "") -> SmtpConnection:
    """Opens a connection that is ready for MAIL. Has no time limit, so the caller must set one.

    `ehlo_name`: empty for `default_ehlo_name`. Raises NotConnected if a later attempt might succeed, and ProviderFault
    if an operator must correct something: TLS, the login or our name.
    """
    tls = context if server.security == "tls" else None
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(
            SmtpProtocol,
            sock=await connect(server.host, server.port),
            ssl=tls,
            server_hostname=server.host if tls else None,
        )
    except OSError as error:
        raise _connect_failure(error) from error
    try:
        extensions = await _negotiated(protocol, server, context, ehlo_name or default_ehlo_name(protocol.address))
        # Read surplus replies now. Otherwise, a surplus reply would later count as the reply to MAIL.
        await protocol.read_available()
        protocol.check()
    except SmtpConnectionLost as broke:
        protocol.abort()
        reason = Reason.SERVER_ERROR if isinstance(broke, InvalidReply) else Reason.CONNECTION_FAILED
        outcome = Deferred(reason, f"{broke} {SmtpPhase.CONNECTING}")
        if isinstance(broke, ServerClosing):
            # The reply's text is left out, because it may repeat our last command, even the password.
            outcome = replace(_refused_to_open(broke.reply).outcome, detail=outcome.detail)
        raise NotConnected(outcome) from broke
    except BaseException:
        protocol.abort()
        raise
    size = extensions.get("size", "")
    return SmtpConnection(
        protocol,
        has_size="size" in extensions,
        size_limit=int(size) if size.isascii() and size.isdigit() and len(size) <= MAX_SIZE_DIGITS else 0,
        has_smtputf8="smtputf8" in extensions and "8bitmime" in extensions,
        has_8bitmime="8bitmime" in extensions,
        has_pipelining="pipelining" in extensions,
    )


async def _negotiated(
    protocol: SmtpProtocol, server: SmtpServer, context: ssl.SSLContext | None, name: str
) -> Mapping[str, str]:
    greeting = await protocol.reply()
    if greeting.code != _READY:
        raise _refused_to_open(greeting)
    extensions = await _say_ehlo(protocol, name)
    if server.security == "starttls":
        assert context is not None
        await _start_tls(protocol, extensions, server, context)
        extensions = await _say_ehlo(protocol, name)
    if server.username:
        await _log_in(protocol, extensions, server)
    return extensions


async def _command(protocol: SmtpProtocol, command: str) -> SmtpReply:
    """Sends a command, unless a surplus reply has arrived, and returns its reply."""
    await protocol.read_available()
    protocol.check()
    protocol.write(f"{command}\r\n".encode(), 1)
    return await protocol.reply()


async def _say_ehlo(protocol: SmtpProtocol, name: str) -> Mapping[str, str]:
    reply = await _command(protocol, f"EHLO {name}")
    if reply.code == _DONE:
        return _extensions_of(reply)
    if reply.is_permanent:
        # The server refuses EHLO, so it may predate ESMTP (1995): try HELO.
        reply = await _command(protocol, f"HELO {name}")
    if reply.blames_our_name or reply.code in (501, 504):  # these codes refuse the parameter, which is our name
        raise setup_fault("refuses our name in EHLO", reply, BAD_NAME)
    if reply.code != _DONE:
        raise _refused_to_open(reply)
    return {}


def _extensions_of(reply: SmtpReply) -> Mapping[str, str]:
    """The extensions in a reply to EHLO: `SIZE 10240000` becomes `{"size": "10240000"}`."""
    extensions: dict[str, str] = {}
    for line in reply.text.split("\n")[1:]:
        keyword, _, parameters = line.strip().partition(" ")
        if keyword.lower().startswith("auth="):  # the form that servers used before RFC 2554
            keyword, parameters = "auth", f"{keyword[5:]} {parameters}"
        keyword = keyword.lower()
        before = f"{extensions['auth']} " if keyword == "auth" and "auth" in extensions else ""
        extensions[keyword] = before + parameters
    return extensions


def default_ehlo_name(address: str) -> str:
    """This host's full name; without one, the local IP address (RFC 5321, section 4.1.4)."""
    return full_name_of_this_host() or (f"[IPv6:{address}]" if ":" in address else f"[{address}]")


async def _start_tls(
    protocol: SmtpProtocol, extensions: Mapping[str, str], server: SmtpServer, context: ssl.SSLContext
) -> None:
    if "starttls" not in extensions:
        words = "the SMTP server does not offer STARTTLS, which smtp:// requires."
        raise ProviderFault(NAME, words, remedy=BAD_SECURITY)
    reply = await _command(protocol, "STARTTLS")
    if reply.is_permanent:
        raise ProviderFault(NAME, f"the SMTP server refused STARTTLS ({reply.code}).", remedy=BAD_SECURITY)
    if reply.code != _READY:
        raise _refused_to_open(reply)
    try:
        await protocol.start_tls(context, server.host)
    except OSError as error:
        raise _connect_failure(error) from error


async def _log_in(protocol: SmtpProtocol, extensions: Mapping[str, str], server: SmtpServer) -> None:
    offered = extensions.get("auth", "").lower().split()
    reply = await log_in(partial(_command, protocol), offered, server.username, server.password)
    if reply is None:
        remedy = NO_PASSWORDS if any("oauth" in method for method in offered) else BAD_SECURITY
        words = "the SMTP server offers no login that we support (AUTH PLAIN, LOGIN or CRAM-MD5)."
        raise ProviderFault(NAME, words, remedy=remedy)
    if reply.code == _SIGNED_IN:
        return
    sent = Secrets()
    sent.register("login", (server.password, server.username))  # removes the user name in clear, too
    reply = replace(reply, text=sent.without(reply.text))
    if reply.is_permanent or reply.enhanced == "4.7.12" or "password transition" in reply.text.lower():
        raise setup_fault("refuses the login", reply)
    outcome = _refused_to_open(reply).outcome
    words = f"the server temporarily refuses the login: {outcome.detail or 'no reason given'}"
    raise NotConnected(replace(outcome, detail=words) if reply.is_transient else outcome, remedy_for(reply))


def _connect_failure(error: OSError) -> Exception:
    words = f"no connection to the server: {scrub(error.strerror or type(error).__name__)}"
    fault = tls_fault(NAME, "the SMTP server", error, url=URL)
    return fault or NotConnected(Deferred(Reason.CONNECTION_FAILED, words))


def _refused_to_open(reply: SmtpReply) -> NotConnected:
    """Its outcome is `Deferred` even for a permanent refusal, because the email is not the cause."""
    judged = refusal(reply, SmtpPhase.CONNECTING)
    if isinstance(judged, Deferred):
        return NotConnected(judged)
    fault = judged.fault if isinstance(judged, Rejected) else None
    return NotConnected(Deferred(Reason.SERVER_ERROR, scrub(reply.text) or None, reply.codes, fault=fault))
