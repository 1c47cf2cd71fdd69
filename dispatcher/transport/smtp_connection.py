"""Opening an SMTP connection: TCP, TLS that is verified or refused, EHLO, AUTH. Every failure here is definite.

It is `NotConnected` (try again later) or `ProviderFault` (a person must mend something).
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
from dispatcher.transport.smtp_conversation import ConnectionBroke, Conversation, GarbledReply, ServerClosing
from dispatcher.transport.smtp_replies import SmtpPhase, SmtpReply, refusal

NAME: Final = "smtp"

MOST_SIZE_DIGITS: Final = 20
"""The most digits of SIZE (RFC 1870, section 4). Python refuses to convert some thousands of digits."""
_READY: Final = 220
_DONE: Final = 250
_GO_ON: Final = 334
_SIGNED_IN: Final = 235

_BAD_TLS: Final = "Mend the server's certificate, or name the authority that signed it in DISPATCHER_CA_FILE."
_BAD_LOGIN: Final = "Check the user and password in DISPATCHER_SMTP_URL."
_BAD_SECURITY: Final = "Check DISPATCHER_SMTP_URL: smtp:// is STARTTLS, smtps:// is TLS from the first byte."


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
class SmtpConnection:
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


async def open_connection(server: SmtpServer, context: ssl.SSLContext | None) -> SmtpConnection:
    """A connection on which the server expects MAIL; takes as long as the server likes: the caller sets a deadline.

    Args:
        context: Verifies certificate and host name; None where the server is reached without TLS.

    Raises:
        NotConnected: not now.
        ProviderFault: not before somebody mends it: TLS missing or not trusted, credentials refused.
    """
    conversation = await _connected(server, context)
    try:
        offers = await _negotiated(conversation, server, context)
        # A surplus reply would be taken for the answer to MAIL.
        await conversation.hear()
        conversation.check()
    except ConnectionBroke as broke:
        conversation.abort()
        raise _broken(broke) from broke
    except BaseException:
        conversation.abort()
        raise
    size = offers.get("size", "")
    return SmtpConnection(
        conversation,
        has_size="size" in offers,
        size_limit=int(size) if size.isascii() and size.isdigit() and len(size) <= MOST_SIZE_DIGITS else 0,
        has_smtputf8="smtputf8" in offers and "8bitmime" in offers,
        has_pipelining="pipelining" in offers,
    )


async def _connected(server: SmtpServer, context: ssl.SSLContext | None) -> Conversation:
    tls = context if server.security == "tls" else None
    try:
        _, conversation = await asyncio.get_running_loop().create_connection(
            Conversation, server.host, server.port, ssl=tls
        )
    except (OSError, UnicodeError) as error:
        raise _connect_failure(error) from error
    return conversation


async def _negotiated(
    conversation: Conversation, server: SmtpServer, context: ssl.SSLContext | None
) -> Mapping[str, str]:
    """Greets the server, starts TLS, logs in; returns its extensions' parameters by keyword, in lower case."""
    greeting = await conversation.reply()
    if greeting.code != _READY:
        raise _unwilling(greeting)
    offers = await _greet(conversation)
    if server.security == "starttls":
        assert context is not None
        await _start_tls(conversation, offers, server, context)
        offers = await _greet(conversation)
    if server.username:
        await _log_in(conversation, offers, server)
    return offers


async def _ask(conversation: Conversation, command: str) -> SmtpReply:
    """Sends a command and returns its reply; refuses replies that came before the command."""
    await conversation.hear()
    conversation.check()
    conversation.write(f"{command}\r\n".encode(), 1)
    return await conversation.reply()


async def _greet(conversation: Conversation) -> Mapping[str, str]:
    name = _our_name(conversation.address)
    reply = await _ask(conversation, f"EHLO {name}")
    if reply.code == _DONE:
        return _offers(reply)
    if reply.is_permanent:
        # A server from before 1995, without extensions.
        reply = await _ask(conversation, f"HELO {name}")
    if reply.code != _DONE:
        raise _unwilling(reply)
    return {}


def _offers(reply: SmtpReply) -> Mapping[str, str]:
    """The extensions in a reply to EHLO: parameters by keyword, in lower case."""
    offers: dict[str, str] = {}
    for line in reply.text.split("\n")[1:]:
        keyword, _, parameters = line.strip().partition(" ")
        if keyword.lower().startswith("auth="):  # the form before RFC 2554
            keyword, parameters = "auth", f"{keyword[5:]} {parameters}"
        keyword = keyword.lower()
        offers[keyword] = f"{offers['auth']} {parameters}" if keyword == "auth" and "auth" in offers else parameters
    return offers


def _our_name(address: str) -> str:
    """What we call ourselves in EHLO: a full name, else the address that we come from (RFC 5321, section 4.1.4)."""
    name = socket.gethostname()
    if "." in name.strip(".") and name.isascii():
        return name
    return f"[IPv6:{address}]" if ":" in address else f"[{address}]"


async def _start_tls(
    conversation: Conversation, offers: Mapping[str, str], server: SmtpServer, context: ssl.SSLContext
) -> None:
    if "starttls" not in offers:
        raise ProviderFault(
            NAME, "the SMTP server does not offer STARTTLS, and without it nothing is sent.", remedy=_BAD_SECURITY
        )
    reply = await _ask(conversation, "STARTTLS")
    if reply.is_permanent:
        raise ProviderFault(NAME, f"the SMTP server refused STARTTLS ({reply.code}).", remedy=_BAD_SECURITY)
    if reply.code != _READY:
        raise _unwilling(reply)
    try:
        await conversation.secure(context, server.host)
    except OSError as error:
        raise _connect_failure(error) from error


async def _log_in(conversation: Conversation, offers: Mapping[str, str], server: SmtpServer) -> None:
    methods = {"plain": _plain, "login": _login, "cram-md5": _cram_md5}
    offered = offers.get("auth", "").lower().split()
    # One method, tried once: more tries with the same password could lock the account.
    method = next((method for name, method in methods.items() if name in offered), None)
    if method is None:
        raise ProviderFault(
            NAME, "the SMTP server offers no way to sign in (AUTH PLAIN, LOGIN or CRAM-MD5).", remedy=_BAD_SECURITY
        )
    reply = await method(conversation, server.username.encode(), server.password.encode())
    if reply.code != _SIGNED_IN:
        raise _log_in_failure(reply)


async def _plain(conversation: Conversation, user: bytes, password: bytes) -> SmtpReply:
    secret = _base64(b"\0" + user + b"\0" + password)
    return await _ask(conversation, f"AUTH PLAIN {secret}")


async def _login(conversation: Conversation, user: bytes, password: bytes) -> SmtpReply:
    reply = await _ask(conversation, f"AUTH LOGIN {_base64(user)}")
    return await _ask(conversation, _base64(password)) if reply.code == _GO_ON else reply


async def _cram_md5(conversation: Conversation, user: bytes, password: bytes) -> SmtpReply:
    """RFC 2195."""
    reply = await _ask(conversation, "AUTH CRAM-MD5")
    if reply.code != _GO_ON:
        return reply
    try:
        challenge = base64.b64decode(reply.text, validate=True)
    except (binascii.Error, ValueError):
        raise GarbledReply("the server sent a challenge that is not Base64") from None
    digest = hmac.digest(password, challenge, "md5").hex()
    return await _ask(conversation, _base64(user + b" " + digest.encode()))


def _base64(octets: bytes) -> str:
    return base64.b64encode(octets).decode()


def _log_in_failure(reply: SmtpReply) -> Exception:
    # The server's words may repeat the user's name, and whatever else we sent it: its code says enough.
    if reply.is_permanent:
        words = f"the SMTP server refused the user name and password ({reply.codes})."
        return ProviderFault(NAME, words, remedy=_BAD_LOGIN)
    words = "the server refused to log us in for now" if reply.is_transient else "unexpected reply to AUTH"
    return NotConnected(Deferred(Reason.SERVER_ERROR, words, reply.codes))


def _connect_failure(error: Exception) -> Exception:
    if isinstance(error, ssl.SSLError):
        return _tls_failure(error)
    if isinstance(error, UnicodeError):
        return ProviderFault(NAME, "the SMTP server's host name is not a name.", remedy=_BAD_SECURITY)
    return _unreached(error)


def _broken(broke: ConnectionBroke) -> NotConnected:
    if isinstance(broke, ServerClosing):
        # The reply's text is left out: it may repeat what we sent last, even the password.
        return NotConnected(replace(_unwilling(broke.reply).outcome, detail=f"{broke} {SmtpPhase.CONNECTING}"))
    reason = Reason.SERVER_ERROR if isinstance(broke, GarbledReply) else Reason.CONNECTION_FAILED
    return NotConnected(Deferred(reason, f"{broke} {SmtpPhase.CONNECTING}"))


def _tls_failure(error: ssl.SSLError) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        words = scrub(error.verify_message)
        return ProviderFault(NAME, f"the SMTP server's certificate cannot be trusted: {words}.", remedy=_BAD_TLS)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return _unreached(error)
    return ProviderFault(NAME, f"TLS with the SMTP server failed: {error.reason}.", remedy=_BAD_SECURITY)


def _unwilling(reply: SmtpReply) -> NotConnected:
    """The server answered, but not with what opens a connection: never the email's fault, whatever the code."""
    judged = refusal(reply, SmtpPhase.CONNECTING)
    if isinstance(judged, Deferred):
        return NotConnected(judged)
    return NotConnected(Deferred(Reason.SERVER_ERROR, scrub(reply.text) or None, reply.codes))


def _unreached(error: BaseException) -> NotConnected:
    words = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return NotConnected(Deferred(Reason.CONNECTION_FAILED, f"no connection to the server: {scrub(words)}"))
