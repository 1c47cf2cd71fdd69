"""The configurable behaviour of the local server `smtp_sink`: faults, extensions, limits, latency."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Step(StrEnum):
    """A step of the SMTP dialogue at which the server can inject a fault."""

    CONNECT = "connect"
    """In place of the greeting."""
    EHLO = "ehlo"
    STARTTLS = "starttls"
    AUTH = "auth"
    MAIL = "mail"
    RCPT = "rcpt"
    DATA = "data"
    RSET = "rset"
    QUIT = "quit"
    BODY = "body"
    """At the first octet of the content. The client expects no reply here, so only an `SmtpFault` is useful."""
    END = "end"
    """At the final dot, before the email is accepted: the ledger does not have the email."""
    ANSWER = "answer"
    """After the email is accepted, instead of the answer: the ledger has the email."""


class SmtpFault(StrEnum):
    """A fault that the server injects instead of a reply (see `SmtpBehaviour.script`)."""

    CLOSE = "close"
    """Close the connection."""
    RESET = "reset"
    """Abort the connection."""
    HANG = "hang"
    """Never reply."""
    DRIP = "drip"
    """Send a reply without end, one octet every 20 ms."""
    FREEZE = "freeze"
    """Like HANG, and stop reading, so that the client's socket buffer fills up."""


@dataclass(slots=True)
class SmtpBehaviour:
    """The local SMTP server's behaviour, which may be changed while the server runs.

    Attributes:
        script: By step: what the server does instead of its normal reply. Either an `SmtpFault`, or the text of another
            reply, with CRLF between its lines. `times`: how many more times; None for always.
        security: `none`, `starttls` or `tls`. Without `tls`, the context, the server does not offer STARTTLS.
        login: The user and password that a client must send before MAIL; None if clients need no login.
        tokens: The access tokens with which the user of `login` may log in, instead of the password (XOAUTH2).
        most_recipients: The most recipients of one transaction; 0 for no limit. Further recipients get 452 4.5.3.
        most_sessions: The most open connections; 0 for no limit. The server refuses further connections with 421.
        slow_seconds: Delay before the reply to a recipient whose address begins with `slow`.
        size_limit: The largest accepted email, in octets, which the server also announces (SIZE); 0 for no limit.
        extensions: The extensions that the server announces, in addition to SIZE, STARTTLS and AUTH.
        refusal: The reply to a recipient whose address begins with `refused`.
        strict: Whether the server refuses an email with a bare CR or LF, or with a line of more than 998 octets.
    """

    script: dict[Step, str] = field(default_factory=dict)
    times: int | None = None
    security: str = "none"
    tls: ssl.SSLContext | None = None
    login: tuple[str, str] | None = None
    login_methods: str = "PLAIN LOGIN"
    tokens: set[str] = field(default_factory=set)
    most_recipients: int = 0
    most_sessions: int = 0
    latency_seconds: float = 0.0
    slow_seconds: float = 0.2
    size_limit: int = 0
    extensions: tuple[str, ...] = ("PIPELINING", "8BITMIME", "SMTPUTF8", "ENHANCEDSTATUSCODES")
    refusal: str = "550 5.1.1 <{address}>: Recipient address rejected: User unknown in virtual mailbox table"
    strict: bool = True

    def scripted(self, step: Step) -> str | None:
        """What the server does at this step instead of its normal reply, or None. Counts `times` down."""
        wanted = self.script.get(step)
        if wanted is None or self.times is None:
            return wanted
        if self.times <= 0:
            return None
        self.times -= 1
        return wanted

    def change(self, document: Mapping[str, Any]) -> None:
        """Sets `script`, `times` and `latency_ms` from a JSON object. A missing field gets its default value."""
        script = {Step(step): text for step, text in document.get("script", {}).items()}
        self.latency_seconds = document.get("latency_ms", 0) / 1000
        self.script, self.times = script, document.get("times")
