"""The configurable behaviour of the local server `http_double`: faults, refusals, throttling, latency."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson


class Fault(StrEnum):
    """A fault that the local server injects instead of a normal answer.

    With FORGET, CLOSE_UNREAD and RESET_UNREAD, the server accepts nothing. With every other fault, the server first
    accepts the email and records it in the ledger. So a second attempt is a duplicate, unless the two requests have the
    same idempotency key.
    """

    FORGET = "forget"
    """Read the whole request, accept nothing, and close the connection without an answer."""

    CLOSE_UNREAD = "close-unread"
    """Close the connection after the request's headers, without reading the body, and accept nothing."""
    RESET_UNREAD = "reset-unread"
    """Like CLOSE_UNREAD, with a TCP reset."""
    CLOSE = "close"
    """Close the connection without an answer."""
    RESET = "reset"
    """Like CLOSE, with a TCP reset."""
    HANG = "hang"
    """Never answer."""
    DRIP = "drip"
    """Send headers without end, one octet every 20 ms."""
    DRIP_BODY = "drip-body"
    """Send the headers in one write, then a body without end, one octet every 20 ms."""
    HALF = "half"
    """Send half of an answer's body, then close the connection."""
    HALF_HEAD = "half-head"
    """Send half of an answer's headers, then close the connection."""
    FLOOD = "flood"
    """Answer 202 with a body of 64 MiB."""
    HTML = "html"
    """Answer 200 with a web page."""
    EMPTY = "empty"
    """Answer 200 without a body."""
    GARBAGE = "garbage"
    """Send bytes that are not HTTP."""
    REDIRECT = "redirect"
    """Answer 307 to the same path. A client that follows the redirect posts the email twice."""
    LAST_ANSWER = "last-answer"
    """Send the normal answer, then close the connection, although no header `Connection: close` has announced this."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The HTTP answer to a request whose emails are all refused; a `body` that is not bytes is sent as JSON."""

    status: int
    body: object = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Behaviour:
    """The local server's behaviour, which may be changed while the server runs.

    Attributes:
        fault: What the server does instead of accepting and answering. `times`: how many more times; None: always.
        throttled_until: Until this time, in seconds since 1970, the server answers 429 to every request.
        key: The API key that SendGrid's, Resend's and Twilio's requests need; None if any key is accepted.
        culprits: The addresses that the server refuses, each with the error that the answer contains: an error code for
            Twilio, the email's status for a bulk call of SES, and an error text for all other requests.
        names_culprits: Whether SendGrid's answer to a bulk call identifies the refused email.
    """

    fault: Fault | Reply | None = None
    times: int | None = None
    throttled_until: float = 0.0
    latency_seconds: float = 0.0
    key: str | None = None
    culprits: Mapping[str, str] = field(default_factory=dict)
    names_culprits: bool = False

    def next_fault(self) -> Fault | Reply | None:
        """The fault for the next request; None for a normal answer. Reduces `times` by 1 if a fault is returned."""
        if self.fault is None or self.times is None:
            return self.fault
        if self.times <= 0:
            return None
        self.times -= 1
        return self.fault

    def throttle(self, seconds: float) -> None:
        self.throttled_until = time.time() + seconds

    def change(self, document: Mapping[str, Any]) -> None:
        """Sets the behaviour from a JSON object: `act` (the value of a `Fault`) or `reply` ({status, body,
        headers}), `times`, `throttle_seconds`, `latency_ms`, `culprits` and `names_culprits`. Missing fields get
        their defaults."""
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
    404: "Not Found", 409: "Conflict", 413: "Payload Too Large", 429: "Too Many Requests", 500: "Internal Server Error",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip


def answer(status: int, headers: Mapping[str, str], body: bytes, *, announced: int | None = None) -> bytes:
    """The octets of an HTTP answer. `announced` is the Content-Length to send instead of the body's true length."""
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    octets = len(body) if announced is None else announced
    start = f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\nServer: nginx\r\nContent-Length: {octets}\r\n"
    return f"{start}{head}\r\n".encode() + body


def octets_of(reply: Reply) -> bytes:
    if isinstance(reply.body, bytes):
        return answer(reply.status, reply.headers, reply.body)
    return answer(reply.status, {"Content-Type": "application/json", **reply.headers}, orjson.dumps(reply.body))
