"""How the HTTP double behaves besides accepting: a script of misdeeds, and the refusals that real servers send."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson


class Fault(StrEnum):
    """What a script may do instead of answering.

    All but the first three accept the email first: the ledger has it, and whoever tries again makes a duplicate.
    """

    FORGET = "forget"
    """Read the whole request, accept nothing, and end the connection without an answer."""

    CLOSE_UNREAD = "close-unread"
    """End the connection at the request's first octets; nothing is accepted."""
    RESET_UNREAD = "reset-unread"
    """The same by a TCP reset."""
    CLOSE = "close"
    """End the connection without an answer."""
    RESET = "reset"
    """The same by a TCP reset."""
    HANG = "hang"
    DRIP = "drip"
    """An endless answer, an octet every 20 ms, that never gets to the end of its headers."""
    DRIP_BODY = "drip-body"
    """The headers at once, and a body that goes on for ever, an octet every 20 ms."""
    HALF = "half"
    """Half of an answer's body, then the end of the connection."""
    HALF_HEAD = "half-head"
    """Half of an answer's headers, then the end of the connection."""
    FLOOD = "flood"
    """The right answer with a body of 64 MiB."""
    HTML = "html"
    """200 with a web page."""
    EMPTY = "empty"
    """200 without a body."""
    GARBAGE = "garbage"
    """What is no HTTP."""
    REDIRECT = "redirect"
    """307 to the same place: who follows it has posted twice."""
    LAST_ANSWER = "last-answer"
    """The right answer, and the end of the connection straight after it, without a word of warning."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that accepts nothing.

    Attributes:
        body: Sent as JSON unless it is bytes.
    """

    status: int
    body: object = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Behaviour:
    """How the server behaves; may be changed while it runs.

    Attributes:
        act: What it does instead of accepting and answering; None to accept and answer.
        times: How many more requests meet the act; None for all.
        throttled_until: Until then everything is answered 429, unix seconds.
        latency_seconds: Before an answer.
        key: The API key that SendGrid's requests need; None for any.
        culprits: Addresses to which nothing may go, with the provider's word for why (SES bulk: the entry's status).
        names_culprits: Whether SendGrid tells which of several emails is to blame.
    """

    fault: Fault | Reply | None = None
    times: int | None = None
    throttled_until: float = 0.0
    latency_seconds: float = 0.0
    key: str | None = None
    culprits: Mapping[str, str] = field(default_factory=dict)
    names_culprits: bool = False

    def next_fault(self) -> Fault | Reply | None:
        """What this request meets."""
        if self.fault is None or self.times is None:
            return self.fault
        if self.times <= 0:
            return None
        self.times -= 1
        return self.fault

    def throttle(self, seconds: float) -> None:
        """Answer 429 to everything for so long."""
        self.throttled_until = time.time() + seconds

    def change(self, document: Mapping[str, Any]) -> None:
        """Behave as a JSON object says: `act` or `reply` ({status, body, headers}), `times`, `throttle_seconds`,
        `latency_ms`, `culprits`, `names_culprits`; what it does not name is reset.
        """
        latency_seconds = document.get("latency_ms", 0) / 1000
        throttle_seconds = float(document.get("throttle_seconds", 0))
        reply, act = document.get("reply"), document.get("act")
        self.fault = _reply(reply) if reply else Fault(act) if act else None
        self.times = document.get("times")
        self.latency_seconds = latency_seconds
        self.throttle(throttle_seconds)
        self.culprits = dict(document.get("culprits", {}))
        self.names_culprits = bool(document.get("names_culprits", False))


def _reply(document: Mapping[str, Any]) -> Reply:
    return Reply(document["status"], document.get("body", b""), document.get("headers", {}))


REASONS: Final = {
    200: "OK", 202: "Accepted", 307: "Temporary Redirect", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden",
    404: "Not Found", 413: "Payload Too Large", 429: "Too Many Requests", 500: "Internal Server Error",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip


def answer(status: int, headers: Mapping[str, str], body: bytes, *, announced: int | None = None) -> bytes:
    """An HTTP answer's octets.

    Args:
        announced: The length that it claims, where that is not the body's.
    """
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    octets = len(body) if announced is None else announced
    start = f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\nServer: nginx\r\nContent-Length: {octets}\r\n"
    return f"{start}{head}\r\n".encode() + body


def octets_of(reply: Reply) -> bytes:
    """A reply as it goes on the wire."""
    if isinstance(reply.body, bytes):
        return answer(reply.status, reply.headers, reply.body)
    return answer(reply.status, {"Content-Type": "application/json", **reply.headers}, orjson.dumps(reply.body))
