"""An email as an adapter gets it: read back from our tables, already validated at enqueue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Final
from uuid import UUID

from dispatcher.domain.values import value

ERASE_TAG: Final = "one_time_code"
"""Marks an email whose content is deleted once it is sent. It is stored among the tags, and no provider gets it."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that travels with an email.

    Attributes:
        filename: Its name for the reader; no path, no control characters.
        content_type: A MIME type, such as `application/pdf`.
        content: The bytes, decoded.
    """

    filename: str
    content_type: str
    content: bytes = field(repr=False)


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
    attachments: tuple[Attachment, ...] = ()
    tags: tuple[str, ...] = ()
