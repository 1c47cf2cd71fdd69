"""The three results of an HTTP call: a response, no response, or a request that was not sent.

RequestNotSent  the body, or a part of the body, was never sent: a definite failure
NoResponse      the body may have been sent, and no complete response arrived: the outcome is unknown
HttpResponse    whatever the server answered, including a status 500 or an HTML page
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from typing import Any, Final

import orjson

from dispatcher.domain.outcome import Concern, Deferred, Reason, Uncertain
from dispatcher.domain.values import field, value

GATEWAYS: Final = frozenset({502, 504})
"""Statuses of a gateway that got no valid response from the server (RFC 9110, sections 15.6.3 and 15.6.5)."""
MAX_NAME_CHARACTERS: Final = 128
"""The longest message id that we accept; twice the length of SES's."""


class RequestNotSent(Exception):
    """The body, or at least its last octet, was not sent and never will be. `detail` is without addresses."""

    def __init__(self, reason: Reason, detail: str, *, concern: Concern | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.concern = concern  # the cause, if `reason` does not show it

    @property
    def outcome(self) -> Deferred:
        return Deferred(self.reason, self.detail, known_concern=self.concern)


class NoResponse(Exception):
    """The body may have been sent, and no complete response arrived. `status`: that of an incomplete response."""

    def __init__(self, detail: str, *, status: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status

    @property
    def outcome(self) -> Uncertain:
        return Uncertain(self.detail, None if self.status is None else str(self.status))


@value
class HttpResponse:
    """A server's response."""

    status: int
    headers: Mapping[str, str] = field(repr=False)  # by lower-case name; for a repeated header, the last value
    body: bytes = field(repr=False)  # at most the first `http_connection.MAX_RESPONSE_OCTETS`

    @property
    def document(self) -> Mapping[str, Any]:
        """The JSON object in the body; empty if the body is not a JSON object."""
        try:
            document = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return document if isinstance(document, dict) else {}

    @property
    def shown_body(self) -> str:
        """The body's size and type, without its text, which any server on the way may have written."""
        if not self.body.strip():
            return "with an empty body"
        return f"with {len(self.body)} octets of {self.headers.get('content-type', 'no type')[:60]}"

    @property
    def server_time(self) -> float:
        """The server's Unix time, from its `Date` header; without the header, this host's time, which may be wrong."""
        instant = _instant(self.headers.get("date", ""))
        return time.time() if instant is None else instant

    @property
    def retry_after(self) -> float | None:
        """The delay in seconds that `Retry-After` requests (RFC 9110, section 10.2.3); None without that header."""
        after = self.headers.get("retry-after", "").strip()
        if (seconds := number(after)) is not None:
            return seconds
        instant = _instant(after)
        return None if instant is None else max(0.0, instant - self.server_time)


def number(text: str) -> float | None:
    """Parses a header's value; None if the value is not a whole number, or has more than twelve digits."""
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def message_name(text: object) -> str | None:
    """Returns the value if it can be a provider's id of an email: a short text of printable ASCII. Otherwise None."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME_CHARACTERS:
        return None
    return text if text.isascii() and text.isprintable() else None


def _instant(http_date: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(http_date).timestamp()
    except (ValueError, OverflowError):
        return None
