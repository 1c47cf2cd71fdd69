"""Reads what a mail server explains in free text: whether an email failed or is delayed, and the reason per
recipient."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message
from functools import cached_property
from itertools import islice, pairwise
from typing import Final

from dispatcher.domain.event import EventKind
from dispatcher.events.bounce_class import AFTER_DATA, any_of, says_why
from dispatcher.store.address_hashes import normalised

MAX_TEXT_CHARACTERS: Final = 8192
"""Only this much of a server's text is used. Servers explain the bounce at the beginning of the text."""
MAX_COPY_CHARACTERS: Final = 64 * 1024
"""A server's text may end with a copy of the email. Only this much of the text is searched for the copy's beginning."""
MAX_MENTIONS: Final = 10
"""Only so many places of the text that contain an address are searched for the reason."""
BLANK_LINES: Final = re.compile(r"\n[ \t]*\n\s*")
_SERVER: Final = any_of(
    r"^$|<>|mailer[-_ ]?d(a|e)emon|mdaemon|post[ _]?master|ndr admin|mail ?delivery|delivery (sub)?system",
    r"mail (administrator|system|router|server|gateway)|system administrator|mail ?daemon|smtp (server|gateway)",
    r"microsoft ?exchange|exchange server|delivery (status )?notification|(mailer|bounced?|ndr)@",
)
"""Matches the From field of a message that a mail server wrote. Some servers leave the field empty."""
_FAILURE: Final = any_of(
    r"undeliver|non-?deliver|not (be )?deliver|did not reach|not reached|failure notice|bounced|rejected",
    r"(cannot|could ?n.t|unable to|failed to|not possible to) (be )?(deliver|sen[dt])|returned (mail|e-?mail|message)",
    r"deliver\w+ (status notification|fail|problem|error|report|unsucc)|permanent|fatal",
    r"(mail|message|delivery) (delivery )?(fail|error)",
)
_DELAY: Final = any_of(
    r"delayed|still being (retried|tried)|(will|is going to) (be (re)?tried|continue|keep|try|retry)|has been queued",
    r"not yet (been )?deliver|not need to (be )?resen[dt]|warning message only|could not send message for past",
)
_GIVEN_UP: Final = any_of(r"permanent|fatal|final|giv(en|ing) up|no further attempts|not be retried|has failed")
_REPLY_FIELDS: Final = ("X-Autoreply", "X-Autorespond", "X-Auto-Response-From", "X-Vacation")
_COPY_OF_EMAIL: Final = any_of(
    r"^[-=*_ >]*(this is )?(a copy of|(the )?(original|unsent|returned|undelivered|bounced) (message|mail|header)s?\b)"
    r"(?! was).*$",
    r"^[-=*_ >]*(below (this line )?is|message (header|text|contents)|included is|start of|content of).*$",
    r"^[-=*_ >]*(the )?(body|header)s? of.*$",
    r"^(received|return-path|message-id|mime-version|dkim-signature): .*$",
)
"""Matches the line at which a copy of the email begins."""
_ADDRESS_LINE: Final = re.compile(r"^[ \t<\"']*([\w.+%=-]{1,64}@[\w.-]{1,255}\w)", re.MULTILINE)
_STYLE: Final = any_of(r"<(style|script)\b[^<]*")
_LINE_END: Final = any_of(r"<br\b[^<>]*>|</(p|div|tr|li|h\d)>")
_TAG: Final = any_of(r"<!?/?[a-z][^<>]*>")


def kind_of_notice(message: Message, explanation: Explanation, *, names_recipient: bool) -> EventKind | None:
    """BOUNCED if a mail server's message reports a failure; DEFERRED if it reports a delay; otherwise None."""
    # A mail server wrote the message, and not, for example, the recipient's auto-reply.
    if any(name in message for name in _REPLY_FIELDS) or message.get_content_subtype() == "disposition-notification":
        return None
    if "X-Failed-Recipients" in message:
        return EventKind.BOUNCED
    if not _SERVER.search(sender := field(message, "From")):
        return None
    words = f"{field(message, 'Subject')}\n{explanation.text}"
    is_from_daemon = "mailer-daemon" in sender.lower()
    if _FAILURE.search(words) or (names_recipient and (says_why(explanation.text) or is_from_daemon)):
        is_late = _DELAY.search(words) and not _GIVEN_UP.search(explanation.text)
        return EventKind.DEFERRED if is_late else EventKind.BOUNCED
    return None


class Explanation:
    """The server's explanation: the first text part that is not empty, without HTML tags, up to a copy of the email."""

    def __init__(self, parts: Sequence[Message]) -> None:
        self.text = _text_of(parts)
        self._lower = self.text.lower()
        self.text = self.text if len(self._lower) == len(self.text) else self._lower  # a letter may have become two
        self.is_after_data = bool(AFTER_DATA.search(self.text))

    @cached_property
    def _paragraphs(self) -> list[tuple[int, bool]]:
        """For each paragraph, where it ends, and whether it gives a reason."""
        # They are searched for reasons only once, however many recipients the text names.
        ends = [*(blank.start() for blank in BLANK_LINES.finditer(self.text)), len(self.text)]
        return [(end, says_why(self.text[start:end])) for start, end in pairwise([0, *ends])]

    @cached_property
    def _address_lines(self) -> list[tuple[int, str]]:
        """Where each line that begins with an address starts, and the address."""
        return [(found.start(), normalised(found[1])) for found in _ADDRESS_LINE.finditer(self.text)]

    def names(self, address: str) -> bool:
        """Whether the text contains an address. Longer addresses that contain this address do not count."""
        return next(self._places(address), None) is not None

    def about(self, address: str) -> str:
        """What the text says about an address; empty if the text does not contain the address.

        Searches the first paragraph that contains both the address and a reason; if no paragraph does, the whole text.
        The result ends before the next line that begins with a different address.
        """
        found = islice(self._places(address), MAX_MENTIONS)
        places = [(place, self._paragraphs[bisect(self._paragraphs, (place, True))]) for place in found]
        if not places:
            return ""
        place, end = next(((at, end) for at, (end, has_reason) in places if has_reason), (places[0][0], len(self.text)))
        start = self.text.rfind("\n", 0, place) + 1
        lines = islice(self._address_lines, bisect(self._address_lines, (start, "")), None)
        another = next((at for at, named in lines if at >= end or named != address), end)
        return self.text[start : min(another, end)]

    def _places(self, address: str) -> Iterator[int]:
        if address and address in self._lower:
            whole = rf"(?<![\w.+%=-]){re.escape(address)}(?!\w|[.-]\w)"
            yield from (found.start() for found in re.finditer(whole, self._lower))


def _text_of(parts: Sequence[Message]) -> str:
    for part in parts:
        if is_text(part) and (text := decoded(part).strip()):
            text = text[:MAX_COPY_CHARACTERS]
            if part.get_content_subtype() == "html":
                text = _TAG.sub(" ", _LINE_END.sub("\n", _STYLE.sub(" ", text)))
            copy = _COPY_OF_EMAIL.search(text)
            return text[: copy.start() if copy else None][:MAX_TEXT_CHARACTERS]
    return ""


def is_text(part: Message) -> bool:
    """Whether the part is a text. A multipart that has no parts, because its boundary is wrong, counts as a text."""
    return part.get_content_type() in ("text/plain", "text/html") or part.get_content_maintype() == "multipart"


def decoded(part: Message) -> str:
    """The text of a part, with its transfer encoding and charset decoded as far as possible."""
    octets = part.get_payload(decode=True)
    if not isinstance(octets, bytes):
        return ""
    octets = with_newlines(octets)
    try:
        return octets.decode(part.get_content_charset("utf-8"), "replace")
    except (LookupError, ValueError):
        return octets.decode("utf-8", "replace")


def with_newlines(octets: bytes) -> bytes:
    """The octets with each line end, CRLF, CR or LF, as LF. CRCRLF, which some gateways write, is one line end."""
    return octets.replace(b"\r\r\n", b"\n").replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def field(message: Message, name: str) -> str:
    """The decoded value of the first header field with this name, on one line; empty if there is no such field."""
    return unfolded(str(message.get(name, "")))


def unfolded(value: str) -> str:
    """The decoded value of a header field, on one line."""
    if "=?" in value:
        with suppress(ValueError, LookupError, MessageError):
            value = str(make_header(decode_header(value)))
    return " ".join(value.split())
