"""Renders an email as an RFC 5322 message. The standard library's `email` package encodes texts and headers.

All attempts of an email send the same bytes.

    text or html                  the part itself
    html and inline images        multipart/related [html, image, …], in the place of the html
    text, html, calendar          multipart/alternative [text, html, calendar], if there are two of them
    … and attachments             multipart/mixed [the above, invite.ics, attachment, …]
    raw                           the octets that the application gave, after the headers that we add

Everything is ASCII, in lines of at most 998 octets that end in CRLF, so no server needs 8BITMIME. One exception: a
local part that is not ASCII is written into the headers as UTF-8 and needs SMTPUTF8 (RFC 6531, RFC 6532). So this
module joins the lines and parts itself. The library's legacy generator writes ASCII headers only, and took most of the
time of an SMTP email. `EmailMessage` takes four times as long. Of a raw message, our headers precede the first header
that the application wrote, so no signature breaks. Its own Message-ID and Date stay.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email import base64mime, quoprimime
from email.utils import encode_rfc2231, format_datetime
from functools import lru_cache
from typing import Final
from unicodedata import normalize

from dispatcher.domain.address import Address
from dispatcher.domain.calendar import CALENDAR_FILENAME, OutgoingCalendar
from dispatcher.domain.capabilities import has_ascii_local_part
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail, without_recipients
from dispatcher.domain.raw_mime import head_of, names_in
from dispatcher.transport.body import Base64Content, Body
from dispatcher.transport.mime_headers import (
    FOLD,
    LINE_CHARACTERS,
    UnrenderableEmail,
    address_field,
    addresses,
    ascii_domain,
    ascii_spec,
    checked_text,
    encoded_words,
    header_field,
    quoted,
    text_field,
    type_in_base64,
)

LARGE_OCTETS: Final = 64 * 1024
"""From this size, texts are rendered in a thread: rendering takes some milliseconds, and a thread costs 0.1 ms."""
MAX_LINE_OCTETS: Final = 998
"""The longest line, without its line end (RFC 5322, section 2.1.1)."""

_CONTROLS: Final = bytes(set(range(32)) - set(b"\t\r\n")) + b"\x7f"
_FILENAME_SECTION: Final = re.compile(r"(?:%..|[^%]){1,20}")
"""Matches a section of up to 20 characters. An escape such as `%C3` counts as one character, so it is never split."""
_CHANGED_BY_SERVERS: Final = re.compile(r"^(?:\.|F(?=rom ))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RenderedEmail:
    """An email as it is transmitted."""

    body: Body  # CRLF line ends, no dot-stuffing; each part begins a line, so that it can be dot-stuffed separately
    sender: str = field(repr=False)  # of the envelope, with the domain in ASCII
    recipients: tuple[str, ...] = field(repr=False)  # of the envelope, in the order To, Cc, Bcc, each once
    needs_smtputf8: bool  # whether an address has a local part that is not ASCII
    # of each recipient in To, Cc and Bcc, from 1; None if no address is repeated
    positions: tuple[tuple[int, ...], ...] | None = None
    # the positions of the recipients that were left out, because they need SMTPUTF8
    unsupported: frozenset[int] = frozenset()
    lacks_reply_to: bool = False  # whether an address of Reply-To was left out for the same reason
    needs_8bit: bool = False  # whether the body has octets that are not ASCII, although the headers have none

    def positions_of(self, index: int) -> tuple[int, ...]:
        """The positions of an envelope recipient, given its index in `recipients`."""
        return (index + 1,) if self.positions is None else self.positions[index]

    @property
    def content(self) -> bytes:
        return bytes(self.body)


async def rendered(email: OutgoingEmail) -> RenderedEmail:
    """Like `render`, but in a thread if the texts are large. Attachments are encoded when they are written."""
    octets = len(email.text or "") + len(email.html or "")
    return render(email) if octets < LARGE_OCTETS else await asyncio.to_thread(render, email)


def is_sendable_in_ascii(email: OutgoingEmail) -> bool:
    """Whether the sender, the headers of a raw message, and at least one recipient need no SMTPUTF8."""
    if email.raw is not None and not head_of(email.raw).isascii():
        return False
    return has_ascii_local_part(email.sender) and any(map(has_ascii_local_part, (*email.to, *email.cc, *email.bcc)))


async def rendered_in_ascii(email: OutgoingEmail) -> RenderedEmail:
    """Renders an email without the recipients and the Reply-To addresses that need SMTPUTF8."""
    everyone = (*email.to, *email.cc, *email.bcc)
    kept = [position for position, address in enumerate(everyone, 1) if has_ascii_local_part(address)]
    unsupported = frozenset(range(1, len(everyone) + 1)).difference(kept)
    to, cc, reply_to = (
        tuple(filter(has_ascii_local_part, listed))
        for listed in (*(email.shown or (email.to, email.cc)), email.reply_to)
    )
    content = await rendered(replace(without_recipients(email, unsupported), shown=(to, cc), reply_to=reply_to))
    positions = [content.positions_of(index) for index in range(len(content.recipients))]
    return replace(
        content,
        positions=tuple(tuple(kept[position - 1] for position in each) for each in positions),
        unsupported=unsupported,
        lacks_reply_to=reply_to != email.reply_to,
    )


def render(email: OutgoingEmail) -> RenderedEmail:
    """Renders an email: returns the MIME message and the envelope. Raises UnrenderableEmail, which quotes no value."""
    if email.template_id is not None:
        words = "only providers with templates (resend, sendgrid, ses) take template_id; set text or html"
        raise UnrenderableEmail(Reason.INVALID_CONTENT, words)
    sender, from_field = _sender(email.sender)
    to = addresses("to", email.to, Reason.REJECTED_RECIPIENT)
    cc = addresses("cc", email.cc, Reason.REJECTED_RECIPIENT)
    bcc = addresses("bcc", email.bcc, Reason.REJECTED_RECIPIENT)
    reply_to = addresses("reply_to", email.reply_to, Reason.INVALID_CONTENT)
    if not (to or cc or bcc):
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, "to, cc and bcc are empty")
    everyone = (*to, *cc, *bcc)
    if email.shown is not None:
        to, cc = (addresses("to or cc", each, Reason.REJECTED_RECIPIENT) for each in email.shown)
    positions = _positions(everyone)
    once = everyone if positions is None else [everyone[each[0] - 1] for each in positions]
    mailboxes = {"To": to, "Cc": cc, "Reply-To": reply_to}
    if email.raw is not None:
        locals_are_ascii = all(address.local.isascii() for address in (sender, *everyone))
        return RenderedEmail(
            body=Body(("".join(_missing_fields(email, sender.domain)).encode(), email.raw)),
            sender=ascii_spec(sender),
            recipients=tuple(map(ascii_spec, once)),
            needs_smtputf8=not (locals_are_ascii and head_of(email.raw).isascii()),
            positions=positions,
            needs_8bit=not email.raw.isascii(),
        )
    headers = "".join((from_field, *_fields(email, mailboxes, sender.domain)))
    return RenderedEmail(
        body=_with_files(headers.encode(), _body(email), email),
        sender=ascii_spec(sender),
        recipients=tuple(map(ascii_spec, once)),
        needs_smtputf8=not all(address.local.isascii() for address in (sender, *to, *cc, *bcc, *reply_to)),
        positions=positions,
    )


@lru_cache(maxsize=1024)
def _sender(text: str) -> tuple[Address, str]:
    """The sender's address, and the header field From. They are kept, because most emails have one of a few senders."""
    listed = addresses("from", (text,), Reason.REJECTED_SENDER)
    return listed[0], address_field("From", listed)


def _positions(addresses: Sequence[Address]) -> tuple[tuple[int, ...], ...] | None:
    """The positions of each address; None if none is repeated."""
    # Upper and lower case of a domain are equal (RFC 5321, section 2.4), and so are composed and decomposed characters.
    found: dict[tuple[str, str], list[int]] = {}
    if len(addresses) > 1:
        for position, address in enumerate(addresses, 1):
            identity = normalize("NFC", address.local), ascii_domain(address.domain).lower()
            found.setdefault(identity, []).append(position)
    return tuple(map(tuple, found.values())) if 0 < len(found) < len(addresses) else None


def _fields(email: OutgoingEmail, mailboxes: dict[str, list[Address]], domain: str) -> Iterator[str]:
    for name, listed in mailboxes.items():
        if listed:
            yield address_field(name, listed)
    if not mailboxes["To"] and not mailboxes["Cc"]:
        # RFC 5322, section 3.6.3, allows an empty group, for an email that has only Bcc recipients.
        yield "To: undisclosed-recipients:;\r\n"
    yield text_field("Subject", email.subject)
    yield _date_field(email)
    yield _message_id_field(email, domain)
    for name, value in email.headers.items():
        yield header_field(name, value)


def _missing_fields(email: OutgoingEmail, domain: str) -> Iterator[str]:
    """The headers that precede a raw message."""
    assert email.raw is not None
    names = names_in(email.raw)
    if "date" not in names:
        yield _date_field(email)
    if "message-id" not in names:
        yield _message_id_field(email, domain)
    for name, value in email.headers.items():
        yield header_field(name, value)


def _date_field(email: OutgoingEmail) -> str:
    created_at = email.created_at if email.created_at.tzinfo else email.created_at.replace(tzinfo=UTC)
    return f"Date: {_date(int(created_at.timestamp()))}\r\n"


def _message_id_field(email: OutgoingEmail, domain: str) -> str:
    return f"Message-ID: <{email.email_id}@{ascii_domain(domain)}>\r\n"


@lru_cache(maxsize=64)
def _date(second: int) -> str:
    """The second since 1970 as a date of RFC 5322, kept because many emails are created in the same second."""
    return format_datetime(datetime.fromtimestamp(second, UTC))


def _body(email: OutgoingEmail) -> Sequence[bytes | Base64Content]:
    """The part with the texts, in pieces: inline images are encoded when they are written."""
    parts: list[Sequence[bytes | Base64Content]] = []
    if email.text is not None or (email.html is None and email.calendar is None):
        parts.append((_text_part("plain", "text", email.text or ""),))
    if email.html is not None:
        html = (_text_part("html", "html", email.html),)
        images = [file for file in email.attachments if file.content_id is not None]
        files = (_file_part(file) for file in images)
        kind = 'multipart/related;\r\n type="text/html"'
        parts.append(_multipart(kind, "related", email, [html, *files]) if images else html)
    if (calendar := email.calendar) is not None:
        checked_text("the calendar's method", calendar.method)
        method = f"; method={calendar.method}"
        parts.append((_text_part("calendar", "calendar", calendar.content, parameters=method, is_encoded=True),))
    return parts[0] if len(parts) == 1 else _multipart("multipart/alternative", "alternative", email, parts)


def _with_files(headers: bytes, body: Sequence[bytes | Base64Content], email: OutgoingEmail) -> Body:
    # Without HTML, an inline image has no place, so it is a file to download.
    files = [_file_part(file) for file in email.attachments if file.content_id is None or email.html is None]
    if email.calendar is not None:
        files.insert(0, _file_part(calendar_file(email.calendar)))
    pieces = _multipart("multipart/mixed", "mixed", email, [body, *files]) if files else body
    joined: list[bytes | Base64Content] = [headers]
    for piece in pieces:
        last = joined[-1]
        if isinstance(piece, bytes) and isinstance(last, bytes):
            joined[-1] = last + piece
        else:
            joined.append(piece)
    return Body(joined)


def calendar_file(calendar: OutgoingCalendar) -> OutgoingAttachment:
    """The calendar as a file, for mail programs that do not read the alternative."""
    return OutgoingAttachment(CALENDAR_FILENAME, "application/ics", calendar.content.encode())


def _multipart(
    kind: str, name: str, email: OutgoingEmail, parts: Iterable[Sequence[bytes | Base64Content]]
) -> list[bytes | Base64Content]:
    """The pieces of a multipart. Each piece begins a line."""
    boundary = _boundary(name, email)
    pieces: list[bytes | Base64Content] = [
        f'Content-Type: {kind};\r\n boundary="{boundary}"\r\nMIME-Version: 1.0\r\n'.encode()
    ]
    line = f"\r\n--{boundary}\r\n".encode()
    for part in parts:
        pieces += (line, *part)
    pieces.append(f"\r\n--{boundary}--\r\n".encode())
    return pieces


def _file_part(file: OutgoingAttachment) -> Sequence[bytes | Base64Content]:
    name, filename = _filename(checked_text("an attachment's filename", file.filename))
    kind = "attachment"
    content_id = ""
    if file.content_id is not None:
        kind, content_id = "inline", f"\r\nContent-ID: <{checked_text('a content_id', file.content_id)}>"
    head = (
        f"Content-Type: {type_in_base64(file.content_type)}{name}\r\n"
        f"Content-Transfer-Encoding: base64\r\nContent-Disposition: {kind}{filename}{content_id}\r\n\r\n"
    )
    return head.encode(), Base64Content(file.content, has_lines=True)


def _boundary(kind: str, email: OutgoingEmail) -> str:
    # The boundary is not random, so that every attempt sends the same bytes. No part contains `--=_`: `_encoded`
    # prevents it in texts, and Base64 has no such characters.
    return f"=_{kind}_{email.email_id.hex}"


def _text_part(subtype: str, name: str, text: str, *, parameters: str = "", is_encoded: bool = False) -> bytes:
    # CRLF ends every line, including the last (RFC 2046, section 4.1.1). An empty text stays empty.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text and not text.endswith("\n"):
        text += "\n"
    text = text.replace("\n", "\r\n")
    try:
        octets = text.encode()
    except UnicodeEncodeError:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"{name} is not Unicode text") from None
    if is_encoded:
        # Outlook documents Base64 for calendars, and servers do not change it.
        charset, encoding, octets = "utf-8", "base64", base64mime.body_encode(octets, eol="\r\n").encode()
    else:
        charset, encoding, octets = _encoded(text, octets)
    head = (
        f'Content-Type: text/{subtype}; charset="{charset}"{parameters}\r\nMIME-Version: 1.0\r\n'
        f"Content-Transfer-Encoding: {encoding}\r\n\r\n"
    )
    return head.encode() + octets


def _encoded(text: str, octets: bytes) -> tuple[str, str, bytes]:
    """The charset, the transfer encoding and the encoded text, which no server changes, and without a MIME boundary."""
    is_clean = text.isascii() and "--=_" not in text and len(octets.translate(None, _CONTROLS)) == len(octets)
    if is_clean and max(map(len, octets.split(b"\r\n"))) <= MAX_LINE_OCTETS:
        return "us-ascii", "7bit", octets
    # Choose the shorter encoding. Quoted-printable triples each octet that is not ASCII. Base64 makes the whole text
    # longer by a third.
    if (len(octets) - len(text)) * 12 <= len(octets):
        # A longer line could exceed 76 characters (RFC 2045, section 6.7) when its first character is encoded.
        lines = quoprimime.body_encode(octets.decode("latin-1"), maxlinelen=74, eol="\r\n")
        # No line begins with a dot or `From `, which some servers and mailboxes change.
        lines = _CHANGED_BY_SERVERS.sub(lambda first: f"={ord(first[0]):02X}", lines)
        return "utf-8", "quoted-printable", lines.encode()
    return "utf-8", "base64", base64mime.body_encode(octets, eol="\r\n").encode()


def _filename(name: str) -> tuple[str, str]:
    """The parameters `name`, which only old mail programs read, and `filename`, each with a semicolon before it."""
    # An ASCII name is one quoted string, because some mail programs read no sections. Any other `filename` is as in RFC
    # 2231, and its `name` has encoded words.
    if name.isascii() and "=?" not in name:
        return "", f";{FOLD}filename={quoted(name)}"
    encoded = encode_rfc2231(name, "utf-8", "")
    parameters = [f"filename*={encoded}"]
    if len(parameters[0]) > LINE_CHARACTERS:
        sections = enumerate(_FILENAME_SECTION.findall(encoded))
        parameters = [f"filename*{number}*={section}" for number, section in sections]
    return f';{FOLD}name="{encoded_words("Content-Type", name)}"', "".join(f";{FOLD}{each}" for each in parameters)
