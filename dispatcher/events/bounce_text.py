"""Reads what a mail server explains in free text: whether an email failed or is delayed, and the reason per
recipient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message
from typing import Final

from dispatcher.domain.provider_event import EventKind
from dispatcher.events.bounce_class import any_of, says_why
from dispatcher.store.address_hashes import normalised

MAX_TEXT_CHARACTERS: Final = 8192
"""Only this much of a server's text is used. Servers explain the bounce at the beginning of the text."""
MAX_COPY_CHARACTERS: Final = 64 * 1024
"""A server's text may end with a copy of the email. Only this much of the text is searched for the copy's beginning."""
BLANK_LINES: Final = re.compile(r"\n[ \t]*\n\s*")
_SERVER: Final = any_of(
    r"^$|<>|mailer[-_ ]?d(a|e)emon|mdaemon|post[ _]?master|ndr admin|mail ?delivery|delivery (sub)?system",
    r"mail (administrator|system|router)|system administrator|mailer@",
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


def kind_of_notice(message: Message, text: str, *, names_recipient: bool) -> EventKind | None:
    """BOUNCED if a mail server's message reports a failure; DEFERRED if it reports a delay.

    None if the message reports neither, or if no mail server wrote the message.

    Args:
        text: The server's explanation (see `explanation`).
        names_recipient: Whether the text names an address to which the email was sent.
    """
    if not _is_from_server(message):
        return None
    if "X-Failed-Recipients" in message:
        return EventKind.BOUNCED
    words = f"{field(message, 'Subject')}\n{text}"
    if _FAILURE.search(words) or (names_recipient and (says_why(text) or _is_from_daemon(message))):
        is_late = _DELAY.search(words) and not _GIVEN_UP.search(text)
        return EventKind.DEFERRED if is_late else EventKind.BOUNCED
    return None


def _is_from_server(message: Message) -> bool:
    """Whether a mail server wrote the message, and not, for example, the recipient's auto-reply."""
    if any(name in message for name in _REPLY_FIELDS) or message.get_content_subtype() == "disposition-notification":
        return False
    if "X-Failed-Recipients" in message:
        return True
    return bool(_SERVER.search(field(message, "From")))


def _is_from_daemon(message: Message) -> bool:
    return "mailer-daemon" in field(message, "From").lower()


def about(address: str, text: str) -> str:
    """What the text says about an address; empty if the text does not contain the address.

    Searches the first paragraph that contains both the address and a reason; if no paragraph does, the whole text. The
    result begins at the line with the address. It ends before the next line that begins with a different address, or at
    the end of the paragraph.
    """
    if not address or place_of(address, text) < 0:
        return ""
    paragraphs = [each for each in BLANK_LINES.split(text) if place_of(address, each) >= 0]
    chosen = next((each for each in paragraphs if says_why(each)), text)
    start = chosen.rfind("\n", 0, place_of(address, chosen)) + 1
    another = next((each for each in _ADDRESS_LINE.finditer(chosen, start) if normalised(each[1]) != address), None)
    return chosen[start : another.start() if another else None]


def place_of(address: str, text: str) -> int:
    """The index at which the text contains an address; -1 if the text does not contain it. Ignores longer addresses
    that contain this address."""
    found = re.search(rf"(?<![\w.+%=-]){re.escape(address)}(?!\w|[.-]\w)", text, re.IGNORECASE)
    return found.start() if found else -1


def explanation(parts: Sequence[Message]) -> str:
    """The server's explanation: the first text part that is not empty, without its HTML tags. Empty if there is no such
    part.

    If the text ends with a copy of the email, the copy is left out.
    """
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
    try:
        return octets.decode(part.get_content_charset("utf-8"), "replace").replace("\r\n", "\n")
    except (LookupError, ValueError):
        return octets.decode("utf-8", "replace").replace("\r\n", "\n")


def field(message: Message, name: str) -> str:
    """The decoded value of the first header field with this name, on one line; empty if there is no such field."""
    value = str(message.get(name, ""))
    if "=?" in value:
        with suppress(ValueError, LookupError, MessageError):
            value = str(make_header(decode_header(value)))
    return " ".join(value.split())
