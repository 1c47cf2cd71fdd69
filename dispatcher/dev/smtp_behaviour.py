"""The configurable behaviour of the SMTP double: faults by step of the dialogue, extensions, limits, latency."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Step(StrEnum):
    """A step of the SMTP dialogue at which a fault can be injected."""

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
    """A fault that a script injects in place of a reply."""

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
    """The server's behaviour, which may be changed while the server runs.

    Attributes:
        script: For each step, an `SmtpFault`, or the reply to send; CRLF separates the lines of a reply.
        times: How many more times the script applies; None for always.
        security: `none`, `starttls` or `tls`.
        tls: The server's TLS context; STARTTLS is not offered without it.
        login: The user and password without which MAIL is refused; None if no login is needed.
        login_methods: The methods that AUTH announces.
        most_sessions: The most open connections. The server refuses further connections with 421; 0 for no limit.
        latency_seconds: Delay before the answer to an email.
        slow_seconds: Delay before the reply to a recipient whose address begins with `slow`.
        size_limit: The limit that SIZE announces and the server enforces, in octets; 0 for none.
        extensions: The extensions in addition to SIZE, STARTTLS and AUTH.
        strict: Whether the server refuses bare CR or LF, and lines above 998 octets, which a lenient server accepts.
    """

    script: dict[Step, str] = field(default_factory=dict)
    times: int | None = None
    security: str = "none"
    tls: ssl.SSLContext | None = None
    login: tuple[str, str] | None = None
    login_methods: str = "PLAIN LOGIN"
    most_sessions: int = 0
    latency_seconds: float = 0.0
    slow_seconds: float = 0.2
    size_limit: int = 0
    extensions: tuple[str, ...] = ("PIPELINING", "8BITMIME", "SMTPUTF8", "ENHANCEDSTATUSCODES")
    strict: bool = True

    def scripted(self, step: Step) -> str | None:
        """The script's entry for this step; None if there is none, or `times` is used up. Counts `times` down."""
        wanted = self.script.get(step)
        if wanted is None or self.times is None:
            return wanted
        if self.times <= 0:
            return None
        self.times -= 1
        return wanted

    def change(self, document: Mapping[str, Any]) -> None:
        """Sets the script and the latency from a JSON object: `script` (step to text), `times`, `latency_ms`.

        Fields that the object does not have are reset. Everything else is unchanged.
        """
        script = {Step(step): text for step, text in document.get("script", {}).items()}
        self.latency_seconds = document.get("latency_ms", 0) / 1000
        self.script, self.times = script, document.get("times")
