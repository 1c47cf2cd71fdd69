"""An email as an adapter gets it: read back from our tables, already validated at enqueue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Final
from uuid import UUID

from dispatcher.domain.filename import plain_name
from dispatcher.domain.text import name_fault
from dispatcher.domain.values import value
from dispatcher.errors import InvalidEmail

MAX_FILENAME_CHARACTERS: Final = 255
"""The longest filename that common file systems store."""
_MIME_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}"  # RFC 6838, section 4.2
_CONTENT_TYPE: Final = re.compile(rf"{_MIME_NAME}/{_MIME_NAME}")

ERASE_TAG: Final = "one_time_code"
"""Marks an email whose content is deleted once it is sent. The row has it among its tags; no provider gets it."""


@dataclass(frozen=True, slots=True)
class OutgoingAttachment:
    """An email's attachment, as an adapter gets it.

    Attributes:
        filename: Its name for the reader; no path, no control characters.
        content_type: A MIME type, such as `application/pdf`.
        content: The bytes, decoded.
    """

    filename: str
    content_type: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Attachment(OutgoingAttachment):
    """A file that an application attaches to an email; always valid.

    Raises:
        InvalidEmail: names the first argument that breaks a rule.
    """

    def __post_init__(self) -> None:
        """Check everything but the total size, which `Email` checks."""
        if fault := _filename_fault(self.filename):
            raise InvalidEmail("filename", fault)
        if fault := _content_type_fault(self.content_type):
            raise InvalidEmail("content_type", fault)
        if not isinstance(self.content, bytes):
            raise InvalidEmail("content", "must be bytes")


@value
class OutgoingEmail:
    """What is to be sent; addresses are `local@domain` or `Name <local@domain>`, as they were validated at enqueue.

    Attributes:
        email_id: The only name by which a provider learns of this email.
        created_at: When it was enqueued; its Date header on every attempt.
        to: At least one of `to`, `cc` and `bcc` is not empty.
        text: Plain body; None if there is only HTML.
        html: HTML body; None if there is only text.
        template_id: The provider's template that writes subject and body; None if they stand here. An adapter without
            templates rejects such an email.
        template_data: What the template is filled with; JSON values.
    """

    email_id: UUID
    created_at: datetime
    sender: str
    to: tuple[str, ...]
    subject: str
    text: str | None = None
    html: str | None = None
    template_id: str | None = None
    template_data: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    cc: tuple[str, ...] = ()
    bcc: tuple[str, ...] = ()
    reply_to: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attachments: tuple[OutgoingAttachment, ...] = ()
    tags: tuple[str, ...] = ()


def _filename_fault(filename: object) -> str | None:
    if not isinstance(filename, str):
        return "must be a text"
    if len(filename) > MAX_FILENAME_CHARACTERS:
        return f"has more than {MAX_FILENAME_CHARACTERS} characters"
    if fault := name_fault(filename):
        return fault
    plain = plain_name(filename)
    if not plain.replace(".", "").strip():
        return "is empty, or only dots and spaces"
    return "contains a path separator; give the name alone" if "/" in plain or "\\" in plain else None


def _content_type_fault(content_type: object) -> str | None:
    if not isinstance(content_type, str):
        return "must be a text"
    # No parameters: SendGrid refuses them, and the code that builds the MIME part sets charset and boundary.
    if not _CONTENT_TYPE.fullmatch(content_type):
        return "must be type/subtype without parameters, such as application/pdf"
    # RFC 2046 (5.1, 5.2.1) forbids base64 for them.
    if content_type.lower().startswith(("multipart/", "message/")):
        return "cannot be a multipart or message; use application/octet-stream"
    return None
