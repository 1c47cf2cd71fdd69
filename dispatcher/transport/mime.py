"""Renders an email as an RFC 5322 message. The standard library's `email` package encodes texts and headers.

All attempts of an email send the same bytes.

    text or html                  the part itself
    text and html                 multipart/alternative [text, html]
    … and attachments             multipart/mixed [the above, attachment, …]

Everything is ASCII, in lines of at most 998 octets that end in CRLF, so no server needs 8BITMIME. One exception: a
local part that is not ASCII is written into the headers as UTF-8 and needs SMTPUTF8 (RFC 6531, RFC 6532). So this
module joins the lines and parts itself. The library's legacy generator writes ASCII headers only, and took most of the
time of an SMTP email. `EmailMessage` takes four times as long.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email import base64mime, quoprimime
from email.utils import encode_rfc2231, format_datetime
from functools import lru_cache
from typing import Final
from unicodedata import normalize

from dispatcher.domain.address import Address
from dispatcher.domain.capabilities import has_ascii_local_part
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingEmail, without_recipients
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
    """Whether the sender and at least one recipient need no SMTPUTF8."""
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
    headers = "".join((from_field, *_fields(email, mailboxes, sender.domain)))
    return RenderedEmail(
        body=_with_attachments(headers.encode(), _body(email), email),
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
    created_at = email.created_at if email.created_at.tzinfo else email.created_at.replace(tzinfo=UTC)
    yield f"Date: {_date(int(created_at.timestamp()))}\r\n"
    yield f"Message-ID: <{email.email_id}@{ascii_domain(domain)}>\r\n"
    for name, value in email.headers.items():
        yield header_field(name, value)


@lru_cache(maxsize=64)
def _date(second: int) -> str:
    """The second since 1970 as a date of RFC 5322, kept because many emails are created in the same second."""
    return format_datetime(datetime.fromtimestamp(second, UTC))


def _body(email: OutgoingEmail) -> bytes:
    if email.html is None:
        return _text_part("plain", "text", email.text or "")
    html = _text_part("html", "html", email.html)
    if email.text is None:
        return html
    boundary = _boundary("alternative", email)
    head = f'Content-Type: multipart/alternative;\r\n boundary="{boundary}"\r\nMIME-Version: 1.0\r\n\r\n'
    line = f"--{boundary}".encode()
    text = _text_part("plain", "text", email.text)
    return b"".join((head.encode(), line, b"\r\n", text, b"\r\n", line, b"\r\n", html, b"\r\n", line, b"--\r\n"))


def _with_attachments(headers: bytes, body: bytes, email: OutgoingEmail) -> Body:
    if not email.attachments:
        return Body((headers + body,))
    boundary = _boundary("mixed", email)
    mixed = f'Content-Type: multipart/mixed;\r\n boundary="{boundary}"\r\nMIME-Version: 1.0\r\n\r\n--{boundary}\r\n'
    before = headers + mixed.encode() + body
    parts: list[bytes | Base64Content] = []
    for file in email.attachments:
        name, filename = _filename(checked_text("an attachment's filename", file.filename))
        head = (
            f"\r\n--{boundary}\r\nContent-Type: {type_in_base64(file.content_type)}{name}\r\n"
            f"Content-Transfer-Encoding: base64\r\nContent-Disposition: attachment{filename}\r\n\r\n"
        )
        parts += (before + head.encode(), Base64Content(file.content, has_lines=True))
        before = b""
    return Body((*parts, f"\r\n--{boundary}--\r\n".encode()))


def _boundary(kind: str, email: OutgoingEmail) -> str:
    # The boundary is not random, so that every attempt sends the same bytes. No part contains `--=_`: `_encoded`
    # prevents it in texts, and Base64 has no such characters.
    return f"=_{kind}_{email.email_id.hex}"


def _text_part(subtype: str, name: str, text: str) -> bytes:
    text = _with_line_ends(text)
    try:
        octets = text.encode()
    except UnicodeEncodeError:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"{name} is not Unicode text") from None
    charset, encoding, octets = _encoded(text, octets)
    head = (
        f'Content-Type: text/{subtype}; charset="{charset}"\r\nMIME-Version: 1.0\r\n'
        f"Content-Transfer-Encoding: {encoding}\r\n\r\n"
    )
    return head.encode() + octets


def _with_line_ends(text: str) -> str:
    """The text with CRLF after every line, including the last (RFC 2046, section 4.1.1). An empty text stays empty."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text and not text.endswith("\n"):
        text += "\n"
    return text.replace("\n", "\r\n")


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
