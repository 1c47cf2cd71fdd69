"""How a call over HTTP ended: an answer, none, or a request that never left.

NothingLeft    a definite no: the body never left this process, or not all of it, and never will
NoAnswer       the body left, and no whole answer came back: nobody can know
Answer         whatever the server said, a 500 or a web page included
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

import orjson

from dispatcher.domain.outcome import Deferred, Reason, Uncertain
from dispatcher.domain.values import value

MAX_NAME_CHARACTERS: Final = 128
"""Of a message's name; twice SES's."""


class NothingLeft(Exception):
    """The body, or its last octet, did not leave this process, and never will.

    Attributes:
        reason: `connection_failed` or `timeout_before_send`.
        detail: What was seen, scrubbed.
        is_untrusted: The server's certificate was refused; trying again changes nothing.
    """

    def __init__(self, reason: Reason, detail: str, *, is_untrusted: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.is_untrusted = is_untrusted

    @property
    def outcome(self) -> Deferred:
        """What it means for the email."""
        return Deferred(self.reason, self.detail)


class NoAnswer(Exception):
    """The body may have left, and no whole answer came back.

    Attributes:
        detail: What was seen, scrubbed.
        status: Of an answer that broke off, or did not end in time; None if there was not even that.
    """

    def __init__(self, detail: str, *, status: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status

    @property
    def outcome(self) -> Uncertain:
        """What it means for the email."""
        return Uncertain(self.detail, None if self.status is None else str(self.status))


@value
class Answer:
    """What the server said.

    Attributes:
        headers: By their names in lower case; of one that came twice, the last.
        body: Its first `http_connection.MAX_ANSWER_OCTETS`.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def document(self) -> Mapping[str, Any]:
        """The body's JSON object; an empty one if it holds none."""
        try:
            document = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return document if isinstance(document, dict) else {}

    @property
    def server_time(self) -> float:
        """Now, by the server's own clock if it says so: ours may be wrong."""
        instant = _instant(self.headers.get("date", ""))
        return time.time() if instant is None else instant

    @property
    def retry_after(self) -> float | None:
        """Seconds that `Retry-After` asks for (RFC 9110, section 10.2.3); None if it is not there."""
        after = self.headers.get("retry-after", "").strip()
        if (seconds := number(after)) is not None:
            return seconds
        instant = _instant(after)
        return None if instant is None else max(0.0, instant - self.server_time)


def number(text: str) -> float | None:
    """A header's whole number; None if it is none, or has more than twelve digits."""
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def message_name(text: object) -> str | None:
    """What a server calls an email that it accepted; None if that is nothing that a server would."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME_CHARACTERS:
        return None
    return text if text.isascii() and text.isprintable() else None


def _instant(http_date: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(http_date).timestamp()
    except (ValueError, OverflowError):
        return None
