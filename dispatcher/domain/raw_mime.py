"""A MIME message that is sent as it is: its octets, and what its head may contain.

The octets that the application gave stay, except for what no server may get: the header Bcc (and Resent-Bcc), and
Return-Path, which only the recipient's server writes. Line ends become CRLF. So signatures (S/MIME, PGP, DKIM) stay
valid.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from dispatcher.domain.email_rules import MAX_ATTACHMENT_OCTETS
from dispatcher.domain.headers import header_name_fault, is_reserved
from dispatcher.errors import InvalidEmail

FIELD: Final = "raw"
MAX_RAW_OCTETS: Final = MAX_ATTACHMENT_OCTETS // 3 * 4 * 78 // 76 + 1024 * 1024
"""As many octets as an email has whose attachments are as large as attachments may be."""
MAX_HEAD_OCTETS: Final = 64 * 1024
"""The most octets of the header section. Some servers accept no more."""
MAX_LINE_OCTETS: Final = 998
"""Without CRLF (RFC 5322, section 2.1.1)."""

_LONE_LF: Final = re.compile(rb"(?<!\r)\n")
_FIELD: Final = re.compile(rb"([!-9;-~]{1,997}):[^\r\n]*(?:\r\n[ \t][^\r\n]*)*(?:\r\n|\Z)")
"""Without spaces before the colon: Python's parser ends the header section there, and other programs do not."""
_END_OF_HEAD: Final = re.compile(rb"\r?\n\r?\n|\A\r?\n")
_NEVER_SENT: Final = (b"bcc", b"resent-bcc", b"return-path")
_REFUSED: Final = ("apparently-to", "x-sg-")


def head_of(octets: bytes) -> bytes:
    """The header section, with the end of its last line. Also of octets whose line ends are LF."""
    found = _END_OF_HEAD.search(octets)
    head = octets if found is None else octets[: found.start()] + b"\r\n"
    if len(head) > MAX_HEAD_OCTETS:
        raise InvalidEmail(FIELD, f"has headers of more than {MAX_HEAD_OCTETS} bytes")
    return _LONE_LF.sub(b"\r\n", head)


def fields_of(head: bytes) -> Iterator[tuple[str, bytes]]:
    """The header fields: the name in lower case, and the whole field. Raises InvalidEmail for a line that is none."""
    at = 0
    while at < len(head):
        if (found := _FIELD.match(head, at)) is None:
            raise InvalidEmail(FIELD, "has a line among its headers that is not a header")
        yield found[1].decode().lower(), found[0]
        at = found.end()


def names_in(raw: bytes) -> list[str]:
    return [name for name, _ in fields_of(head_of(raw))]


def raw_octets(given: bytes) -> bytes:
    """The message as it is sent. Raises InvalidEmail if SMTP cannot transmit it unchanged."""
    if len(given) > MAX_RAW_OCTETS:
        raise InvalidEmail(FIELD, f"is larger than {MAX_RAW_OCTETS} bytes")
    octets = _LONE_LF.sub(b"\r\n", given) if given.count(b"\n") != given.count(b"\r\n") else given
    if b"\0" in octets or octets.count(b"\r") != octets.count(b"\n"):
        raise InvalidEmail(FIELD, "contains a NUL or a bare CR, which SMTP does not allow; encode the part as Base64")
    head = head_of(octets)
    fields = list(fields_of(head))
    kept = b"".join([field for name, field in fields if name.encode() not in _NEVER_SENT])
    body = octets[len(head) :] if len(octets) > len(head) else b"\r\n"
    raw = kept + body
    if not raw.endswith(b"\r\n"):
        raw += b"\r\n"
    if has_long_line(raw):
        raise InvalidEmail(FIELD, f"has a line of more than {MAX_LINE_OCTETS} bytes, which SMTP does not allow")
    return raw


def has_long_line(octets: bytes) -> bool:
    """Whether a line is longer than `MAX_LINE_OCTETS`. Each line ends with CRLF."""
    start = 0
    while len(octets) - start > MAX_LINE_OCTETS:  # in steps of several short lines
        if (end := octets.rfind(b"\n", start, start + MAX_LINE_OCTETS + 2)) < 0:
            return True
        start = end + 1
    return False


def raw_fault(raw: bytes, allowed: Collection[str]) -> str | None:
    """Why the head of a message may not be sent: it controls a provider, or has what `raw_octets` removes. A phrase to
    put after the field's name; None if it may."""
    try:
        names = names_in(raw)
    except InvalidEmail as error:
        return error.reason
    for name in names:
        if name.encode() in _NEVER_SENT or name.startswith(_REFUSED):
            return f"has the header {name}, which must not be sent; remove it"
        if not is_reserved(name) and (fault := header_name_fault(name, allowed)):
            return f"has the header {name}, which {fault}"
    return None
