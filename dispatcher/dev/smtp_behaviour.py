"""What the SMTP double does besides accepting: misdeeds by step, and what it offers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Step(StrEnum):
    """Where a script may interfere."""

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
    """At the body's first octet; no reply is due, so only an action makes sense."""
    END = "end"
    """At the final dot, in place of accepting: the ledger does not have the email."""
    ANSWER = "answer"
    """After accepting, in place of the answer: the ledger has the email."""


class SmtpFault(StrEnum):
    """What a script may do instead of replying with a line of its own."""

    CLOSE = "close"
    RESET = "reset"
    HANG = "hang"
    DRIP = "drip"
    """An endless reply, an octet every 20 ms."""
    FREEZE = "freeze"
    """As HANG, and reads no more: what the other side sends piles up on its own side."""


@dataclass(slots=True)
class SmtpBehaviour:
    """How the server behaves; may be changed while it runs.

    Attributes:
        script: Steps at which it does something else: an `SmtpFault`, or says this reply, its lines parted by CRLF.
        times: How often the script applies; None for always.
        security: `none`, `starttls` or `tls`.
        tls: The server's side of TLS; where it is missing STARTTLS is not offered.
        login: The user and password that MAIL needs; None for an open server.
        login_methods: What is announced behind AUTH.
        most_sessions: One more is greeted with 421; 0 for no limit.
        latency_seconds: Before the answer to an email.
        slow_seconds: Before the reply to a recipient that begins with `slow`.
        size_limit: Announced and enforced; 0 for none.
        extensions: Offered beside SIZE, STARTTLS and AUTH.
        strict: Refuse bare CR or LF, and lines above 998 octets, that a lenient server would pass on.
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
        """What the script has for this step; None if it has nothing, or has applied often enough."""
        wanted = self.script.get(step)
        if wanted is None or self.times is None:
            return wanted
        if self.times <= 0:
            return None
        self.times -= 1
        return wanted

    def change(self, document: Mapping[str, Any]) -> None:
        """Behaves as a JSON object says: `script` (an object of step and text), `times`, `latency_ms`.

        What the object does not name is reset; the rest of the behaviour stays.
        """
        script = {Step(step): text for step, text in document.get("script", {}).items()}
        self.latency_seconds = document.get("latency_ms", 0) / 1000
        self.script, self.times = script, document.get("times")
