"""An email as RFC 5322 and MIME have it: the same bytes on every attempt.

    text or html                  the part itself
    text and html                 multipart/alternative [text, html]
    … and attachments             multipart/mixed [the above, attachment, …]

Everything that leaves is ASCII in lines of at most 998 octets ending in CRLF, so no server needs 8BITMIME; but a local
part that is not ASCII stands in the headers in UTF-8, and needs SMTPUTF8 (RFC 6531, RFC 6532).
"""

from __future__ import annotations

import asyncio
import re
from binascii import b2a_base64, b2a_qp
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final

from dispatcher.domain.address import Address, parse_address
from dispatcher.domain.email_rules import RESERVED_HEADER_PREFIXES, RESERVED_HEADERS
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import Attachment, OutgoingEmail
from dispatcher.providers.mime_headers import (
    UnrenderableEmail,
    address_field,
    ascii_domain,
    ascii_spec,
    checked,
    parameter,
    text_field,
)

LARGE_OCTETS: Final = 512 * 1024
"""What renders in some milliseconds; a thread costs a tenth of one."""
MAX_LINE_OCTETS: Final = 998
"""RFC 5322, section 2.1.1, without the line end."""
_BASE64_LINE: Final = 76
_CONTROLS: Final = bytes(set(range(32)) - set(b"\t\r\n")) + b"\x7f"
_NOT_ASCII: Final = bytes(range(128, 256))
_WORD: Final = r"[A-Za-z0-9!#$%&'*+.^_`{|}~-]{1,127}"
_CONTENT_TYPE: Final = re.compile(rf"{_WORD}/{_WORD}")
_COMPOSITE: Final = re.compile(r"(?:message|multipart)/", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RenderedEmail:
    """What goes on the wire.

    Attributes:
        content: Headers and body, CRLF line ends, without dot-stuffing.
        sender: The envelope's sender, domain in ASCII.
        recipients: The envelope's recipients, To, Cc, Bcc, in that order and each once.
        needs_smtputf8: An address has a local part that is not ASCII; a server without SMTPUTF8 cannot take this.
    """

    content: bytes = field(repr=False)
    sender: str = field(repr=False)
    recipients: tuple[str, ...] = field(repr=False)
    needs_smtputf8: bool


async def rendered(email: OutgoingEmail) -> RenderedEmail:
    """As `render`; a large email in a thread, since 25 MB take a fifth of a second and others are on the loop."""
    octets = len(email.text or "") + len(email.html or "") + sum(len(file.content) for file in email.attachments)
    return render(email) if octets < LARGE_OCTETS else await asyncio.to_thread(render, email)


def render(email: OutgoingEmail) -> RenderedEmail:
    """The email's bytes and envelope.

    Raises:
        UnrenderableEmail: what enqueue should have refused; says which field, and nothing of its value.
    """
    if email.template_id is not None:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "template_id names a provider's template, and MIME has none")
    sender = _addresses("from", (email.sender,), Reason.REJECTED_SENDER)
    to = _addresses("to", email.to, Reason.REJECTED_RECIPIENT)
    cc = _addresses("cc", email.cc, Reason.REJECTED_RECIPIENT)
    bcc = _addresses("bcc", email.bcc, Reason.REJECTED_RECIPIENT)
    reply_to = _addresses("reply_to", email.reply_to, Reason.INVALID_CONTENT)
    if not (to or cc or bcc):
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, "to, cc and bcc are empty")
    headers = _headers(email, sender[0], to, cc, reply_to)
    content = headers.encode() + _body(email)
    every = (*sender, *to, *cc, *bcc, *reply_to)
    return RenderedEmail(
        content=content,
        sender=ascii_spec(sender[0]),
        recipients=_once((*to, *cc, *bcc)),
        needs_smtputf8=not all(address.local.isascii() for address in every),
    )


def _addresses(name: str, texts: Iterable[str], reason: Reason) -> list[Address]:
    addresses = []
    for text in texts:
        try:
            address = parse_address(text)
            ascii_domain(address.domain)
        except ValueError as error:
            raise UnrenderableEmail(reason, f"{name} {error}") from None
        addresses.append(address)
    return addresses


def _once(addresses: Iterable[Address]) -> tuple[str, ...]:
    """Each mailbox once, as it was first written; only the domain ignores case (RFC 5321, section 2.4)."""
    specs: dict[tuple[str, str], str] = {}
    for address in addresses:
        specs.setdefault((address.local, ascii_domain(address.domain).lower()), ascii_spec(address))
    return tuple(specs.values())


def _headers(
    email: OutgoingEmail, sender: Address, to: list[Address], cc: list[Address], reply_to: list[Address]
) -> str:
    lines = [address_field("From", (sender,))]
    if to:
        lines.append(address_field("To", to))
    if cc:
        lines.append(address_field("Cc", cc))
    if not to and not cc:
        # RFC 5322, section 3.6.3: a group with nobody in it, for an email to Bcc alone.
        lines.append("To: undisclosed-recipients:;\r\n")
    if reply_to:
        lines.append(address_field("Reply-To", reply_to))
    lines.append(text_field("Subject", email.subject))
    lines.append(f"Date: {format_datetime(_utc(email.created_at))}\r\n")
    lines.append(f"Message-ID: <{email.email_id}@{ascii_domain(sender.domain)}>\r\n")
    lines.extend(_own_header(name, value) for name, value in email.headers.items())
    lines.append("MIME-Version: 1.0\r\n")
    return "".join(lines)


def _own_header(name: str, value: str) -> str:
    if name.lower() in RESERVED_HEADERS or name.lower().startswith(RESERVED_HEADER_PREFIXES):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"headers holds {name}, which an email may not set itself")
    return text_field(name, value)


def _utc(instant: datetime) -> datetime:
    return instant.astimezone(UTC) if instant.tzinfo else instant.replace(tzinfo=UTC)


def _body(email: OutgoingEmail) -> bytes:
    """The content's own headers, a blank line, and the content."""
    texts = []
    if email.text is not None or email.html is None:
        texts.append(_text_part("plain", "text", email.text or ""))
    if email.html is not None:
        texts.append(_text_part("html", "html", email.html))
    part = texts[0] if len(texts) == 1 else _multipart("alternative", email, texts)
    if not email.attachments:
        return part
    return _multipart("mixed", email, [part], [_attachment_part(file) for file in email.attachments])


def _multipart(kind: str, email: OutgoingEmail, parts: list[bytes], encoded: Iterable[bytes] = ()) -> bytes:
    """Parts in one; `encoded` are those in Base64, where no boundary can occur."""
    stem = f"=_{kind}_{email.email_id.hex}"
    boundary, number = stem.encode(), 0
    while any(boundary in part for part in parts):
        number += 1
        boundary = f"{stem}_{number}".encode()
    start = f'Content-Type: multipart/{kind}; boundary="'.encode() + boundary + b'"\r\n\r\n'
    body = b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in (*parts, *encoded))
    return start + body + b"--" + boundary + b"--\r\n"


def _text_part(subtype: str, name: str, text: str) -> bytes:
    try:
        octets = _with_line_ends(text).encode()
    except UnicodeEncodeError:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"{name} is not Unicode text") from None
    encoding, body = _transfer_encoded(octets)
    head = f'Content-Type: text/{subtype}; charset="utf-8"\r\nContent-Transfer-Encoding: {encoding}\r\n\r\n'
    return head.encode() + body


def _with_line_ends(text: str) -> str:
    """Every line, the last one too, ends in CRLF; an empty text stays empty."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text and not text.endswith("\n"):
        text += "\n"
    return text.replace("\n", "\r\n")


def _transfer_encoded(octets: bytes) -> tuple[str, bytes]:
    """The encoding's name and the encoded octets: the most readable form that every server passes on unchanged."""
    clean = len(octets.translate(None, _CONTROLS)) == len(octets)
    foreign = 0 if octets.isascii() else len(octets) - len(octets.translate(None, _NOT_ASCII))
    if clean and not foreign and not _has_long_line(octets):
        return "7bit", octets
    # Quoted-printable triples what is not ASCII, Base64 adds a third to everything.
    if foreign * 6 <= len(octets):
        return "quoted-printable", b2a_qp(octets)
    return "base64", _base64(octets)


def _has_long_line(octets: bytes) -> bool:
    """Whether a line is longer than RFC 5322 allows; in strides of that length, so a megabyte takes a thousand."""
    start, stride = 0, MAX_LINE_OCTETS + len(b"\r\n")
    while len(octets) - start > stride:
        found = octets.rfind(b"\r\n", start, start + stride)
        if found < 0:
            return True
        start = found + len(b"\r\n")
    return False


def _attachment_part(file: Attachment) -> bytes:
    if not _CONTENT_TYPE.fullmatch(checked("an attachment's content_type", file.content_type)):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "an attachment's content_type is not a MIME type")
    # RFC 2046, sections 5.1 and 5.2.1: these may not be in Base64, and without it their bytes may change on the way.
    content_type = "application/octet-stream" if _COMPOSITE.match(file.content_type) else file.content_type
    filename = parameter("filename", checked("an attachment's filename", file.filename))
    head = (
        f"Content-Type: {content_type}\r\nContent-Transfer-Encoding: base64\r\n"
        f"Content-Disposition: attachment{filename}\r\n\r\n"
    )
    return head.encode("ascii", "strict") + _base64(file.content)


def _base64(octets: bytes) -> bytes:
    text = b2a_base64(octets, newline=False)
    lines = [text[start : start + _BASE64_LINE] for start in range(0, len(text), _BASE64_LINE)]
    return b"\r\n".join([*lines, b""])
