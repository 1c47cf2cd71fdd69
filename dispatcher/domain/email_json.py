"""The JSON of instants and attachments. `email_rules` checks the values."""

from __future__ import annotations

import base64
import binascii
import re
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from dispatcher.domain.email_rules import MAX_ATTACHMENT_OCTETS, MAX_ATTACHMENTS
from dispatcher.domain.outgoing import MAX_FILENAME_CHARACTERS, Attachment
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
        if name not in ATTACHMENT_FIELDS:
            raise InvalidEmail(f"{field}.{shown(name)}", unknown_fault(name, ATTACHMENT_FIELDS))
    for name in ATTACHMENT_FIELDS:
        if document.get(name) is None:
            raise InvalidEmail(f"{field}.{name}", "is required")
    content = _decoded(f"{field}.content", document["content"])
    try:
        return Attachment(document["filename"], document["content_type"], content)
    except InvalidEmail as error:
        raise InvalidEmail(f"{field}.{error.field}", error.reason) from None


def _decoded(field: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise InvalidEmail(field, "must be a base64 string")
    if len(text) > MAX_BASE64_CHARACTERS:
        raise InvalidEmail(field, f"is larger than {MAX_ATTACHMENT_OCTETS} bytes")
    try:
        if len(text) <= _DECODED_AT_ONCE or text.find("=", 0, -2) >= 0:
            return binascii.a2b_base64(text, strict_mode=True)
        pieces = (text[start : start + _DECODED_AT_ONCE] for start in range(0, len(text), _DECODED_AT_ONCE))
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except ValueError:  # binascii.Error is a ValueError, and non-ASCII characters raise ValueError, too.
        raise InvalidEmail(field, "is not valid base64 (RFC 4648, with padding, without line breaks)") from None


def attachment_document(attachment: Attachment) -> dict[str, str]:
    content = base64.b64encode(attachment.content).decode("ascii")
    return {"filename": attachment.filename, "content_type": attachment.content_type, "content": content}
