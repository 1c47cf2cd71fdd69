"""The JSON of instants, attachments, calendars and MIME messages. `email_rules` checks the values."""

from __future__ import annotations

import base64
import binascii
import re
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from dispatcher.domain.calendar import MAX_CALENDAR_OCTETS, METHODS, Calendar
from dispatcher.domain.email_rules import MAX_ATTACHMENT_OCTETS, MAX_ATTACHMENTS
from dispatcher.domain.outgoing import CONTENT_ID_PATTERN, MAX_FILENAME_CHARACTERS, Attachment
from dispatcher.domain.raw_mime import MAX_RAW_OCTETS
from dispatcher.domain.text import shown, unknown_fault
from dispatcher.errors import InvalidEmail

ATTACHMENT_FIELDS: Final = ("filename", "content_type", "content")
ATTACHMENT_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": list(ATTACHMENT_FIELDS),
    "properties": {
        "filename": {"type": "string", "minLength": 1, "maxLength": MAX_FILENAME_CHARACTERS},
        "content_type": {"type": "string", "pattern": "^[^/]+/[^/]+$", "examples": ["application/pdf"]},
        "content": {"type": "string", "contentEncoding": "base64", "description": "The file, in base64."},
        "content_id": {
            "anyOf": [{"type": "string", "pattern": f"^{CONTENT_ID_PATTERN}$", "examples": ["logo"]}, {"type": "null"}],
            "description": 'Makes the file an inline image, which `<img src="cid:logo">` in `html` shows.',
        },
    },
}
CALENDAR_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["content"],
    "properties": {
        "content": {
            "type": "string",
            "maxLength": MAX_CALENDAR_OCTETS,
            "description": "The iCalendar text (RFC 5545).",
        },
        "method": {
            "anyOf": [{"type": "string", "enum": list(METHODS)}, {"type": "null"}],
            "description": "The METHOD in the text, which is the default.",
        },
    },
}
MAX_BASE64_CHARACTERS: Final = (MAX_ATTACHMENT_OCTETS + 2) // 3 * 4
_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
"""A date and time with a zone (RFC 3339, section 5.6)."""
_DECODED_AT_ONCE: Final = 1 << 16
"""Base64 characters decoded per call; a multiple of four. Decoding a megabyte in one call blocks other threads for
milliseconds."""


def instant_of(field: str, text: object) -> datetime:
    """The instant of an RFC 3339 text, such as `2026-12-24T18:00:00+01:00`. Raises InvalidEmail, also without a time
    zone: we do not know the zone of the program that wrote the text, and do not guess."""
    if isinstance(text, str) and _INSTANT.fullmatch(text):
        with suppress(ValueError):
            return datetime.fromisoformat(text.upper())
    raise InvalidEmail(
        field, "must be a date and time with a zone, such as 2026-12-24T18:00:00+01:00 or 2026-12-24T17:00:00Z"
    )


def instant_text(instant: datetime) -> str:
    """The RFC 3339 text of an instant that is in UTC, such as `2026-12-24T17:00:00Z`. Contains the microseconds if they
    are not zero."""
    return instant.isoformat().replace("+00:00", "Z")


def attachments_of(field: str, listed: object) -> list[Attachment]:
    if not isinstance(listed, list):
        raise InvalidEmail(field, "must be a list")
    if len(listed) > MAX_ATTACHMENTS:
        raise InvalidEmail(field, f"has more than {MAX_ATTACHMENTS} attachments")
    return [_attachment(f"{field}[{index}]", item) for index, item in enumerate(listed)]


def _attachment(field: str, document: object) -> Attachment:
    if not isinstance(document, dict):
        raise InvalidEmail(field, "must be a JSON object")
    for name in document:
        if name not in (*ATTACHMENT_FIELDS, "content_id"):
            raise InvalidEmail(f"{field}.{shown(name)}", unknown_fault(name, (*ATTACHMENT_FIELDS, "content_id")))
    for name in ATTACHMENT_FIELDS:
        if document.get(name) is None:
            raise InvalidEmail(f"{field}.{name}", "is required")
    content = _decoded(f"{field}.content", document["content"])
    try:
        return Attachment(document["filename"], document["content_type"], content, document.get("content_id"))
    except InvalidEmail as error:
        raise InvalidEmail(f"{field}.{error.field}", error.reason) from None


def raw_of(field: str, text: object) -> bytes:
    return _decoded(field, text, MAX_RAW_OCTETS)


def raw_text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def calendar_of(field: str, document: object) -> Calendar:
    if not isinstance(document, dict):
        raise InvalidEmail(field, "must be a JSON object with content, and perhaps method")
    if unknown := [name for name in document if name not in ("content", "method")]:
        raise InvalidEmail(f"{field}.{shown(unknown[0])}", unknown_fault(unknown[0], ("content", "method")))
    if document.get("content") is None:
        raise InvalidEmail(f"{field}.content", "is required")
    method = document.get("method")
    try:
        return Calendar(document["content"], "" if method is None else method)
    except InvalidEmail as error:
        raise InvalidEmail(f"{field}.{error.field}", error.reason) from None


def _decoded(field: str, text: object, most: int = MAX_ATTACHMENT_OCTETS) -> bytes:
    if not isinstance(text, str):
        raise InvalidEmail(field, "must be a base64 string")
    if len(text) > (most + 2) // 3 * 4:
        raise InvalidEmail(field, f"is larger than {most} bytes")
    try:
        if len(text) <= _DECODED_AT_ONCE or text.find("=", 0, -2) >= 0:
            return binascii.a2b_base64(text, strict_mode=True)
        pieces = (text[start : start + _DECODED_AT_ONCE] for start in range(0, len(text), _DECODED_AT_ONCE))
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except ValueError:  # binascii.Error is a ValueError, and non-ASCII characters raise ValueError, too.
        raise InvalidEmail(field, "is not valid base64 (RFC 4648, with padding, without line breaks)") from None


def attachment_document(attachment: Attachment) -> dict[str, str]:
    content = base64.b64encode(attachment.content).decode("ascii")
    inline = {} if attachment.content_id is None else {"content_id": attachment.content_id}
    return {"filename": attachment.filename, "content_type": attachment.content_type, "content": content, **inline}
