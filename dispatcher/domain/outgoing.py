"""The email, SMS or other message that an adapter sends. `enqueue` has validated it."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field  # applications derive from Attachment
from datetime import datetime
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol
from unicodedata import category, normalize
from uuid import UUID

from dispatcher.domain.calendar import CALENDAR_FILENAME, OutgoingCalendar
from dispatcher.domain.text import name_fault
from dispatcher.domain.values import replace, value
from dispatcher.errors import InvalidEmail

# Invisible characters outside Unicode's category Cf: joiners, fillers, variation selectors.
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
_END: Final = re.compile(r"[\s.]+\Z")


def plain_name(filename: str) -> str:
    """The name in Unicode's compatibility form (NFKC), without invisible characters."""
    if filename.isascii():
        return filename
    visible = "".join(character for character in filename if category(character) != "Cf")
    return normalize("NFKC", _INVISIBLE.sub("", visible))


def endings_of(filename: str) -> set[str]:
    """The extensions by which a system may choose the program that opens the file: lower case, without the dot.

    Windows removes spaces and dots at the end of a name. In Windows, a colon ends the name of a drive, or begins the
    name of a file's stream. So the text before a colon and the text after it each count as a name.
    """
    parts = [_END.sub("", part) for part in plain_name(filename).casefold().split(":")]
    return {part.rpartition(".")[2] for part in parts if "." in part}


MAX_FILENAME_CHARACTERS: Final = 255
"""The longest file name that common file systems store."""
_MIME_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}"  # RFC 6838, section 4.2
_CONTENT_TYPE: Final = re.compile(rf"{_MIME_NAME}/{_MIME_NAME}")
CONTENT_ID_PATTERN: Final = "[A-Za-z0-9!$&*+./=^_{}|~@-]{1,200}"
"""The characters of a content id that need no escapes in a header and in a `cid:` URL (RFC 2392)."""

EMAIL_CHANNEL: Final = "email"
"""The channel of emails, as opposed to SMS."""
ERASE_TAG: Final = "one_time_code"
"""Marks an email whose content is deleted after it is sent. The tag stays in the row; no provider receives it."""


def stored_tags(tags: tuple[str, ...], *, is_erased: bool) -> tuple[str, ...]:
    """The tags as PostgreSQL stores them: with `ERASE_TAG` if the content is erased after sending."""
    return (*tags, ERASE_TAG) if is_erased and ERASE_TAG not in tags else tags


@dataclass(frozen=True, slots=True)
class OutgoingAttachment:
    """An attachment, as an adapter receives it.

    Attributes:
        filename: The name that the recipient sees; no path, no control characters.
        content_type: A MIME type, such as `application/pdf`.
        content: The decoded bytes.
        content_id: The id by which the HTML shows the file, as `cid:` and the id; None: a file to download.
    """

    filename: str
    content_type: str
    content: bytes = field(repr=False)
    content_id: str | None = None


@dataclass(frozen=True, slots=True)
class Attachment(OutgoingAttachment):
    """A file to attach to an email. Validated when it is created.

    With a `content_id`, the file is an inline image: `<img src="cid:logo">` in the email's `html` shows
    `Attachment("logo.png", "image/png", content, content_id="logo")`.

    Raises:
        InvalidEmail: An argument is invalid. The error contains the first such argument's name.
    """

    def __post_init__(self) -> None:
        """Checks everything except the total size, which `Email` checks."""
        if fault := _filename_fault(self.filename):
            raise InvalidEmail("filename", fault)
        if fault := _content_type_fault(self.content_type):
            raise InvalidEmail("content_type", fault)
        if not isinstance(self.content, bytes):
            raise InvalidEmail("content", "must be bytes")
        if self.content_id is not None and (fault := _content_id_fault(self.content_id)):
            raise InvalidEmail("content_id", fault)


@value
class OutgoingEmail:
    """The email to send. Addresses are `local@domain` or `Name <local@domain>`, as validated at enqueue.

    Attributes:
        email_id: The only id of this email that the provider receives.
        created_at: The time in the Date header: when the email could first be sent (its enqueue, its `send_at`, or its
            last replay), or when its lease began if that is hours later. After an attempt that may have been accepted,
            every further attempt has the same time.
        to: At least one of `to`, `cc` and `bcc` is not empty.
        text: Plain-text body; None if the email has only HTML.
        html: HTML body; None if the email has only text.
        template_id: The id of a provider's template that writes subject and body; None if the email uses no template.
            An adapter without templates rejects an email that uses a template.
        template_data: The values for the template; JSON values.
        channel: `email`, `sms`, or a channel that a package adds. Routing selects only providers of this channel. In
            channels other than `email`, only `to`, `sender`, `text` and `tags` are set, and `sender` may be empty.
        shown: The headers To and Cc, if they differ from `to` and `cc`: earlier attempts have delivered the email to
            some recipients. An adapter whose API has no separate envelope ignores this. None: `to` and `cc`.
        calendar: A calendar object, to send as an alternative to the bodies and as the file `invite.ics`.
        raw: The whole MIME message. The other fields are only the envelope, and `headers` to add before it. None: the
            message is built from the other fields.
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
    channel: str = EMAIL_CHANNEL
    shown: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    calendar: OutgoingCalendar | None = None
    raw: bytes | None = field(default=None, repr=False)


class FilePart(NamedTuple):
    """A part of an email that is stored like an attachment, so that a worker reads it just before it sends the email.

    `part`: `calendar` or `raw`; None: an attachment.
    """

    filename: str
    content_type: str
    content: bytes
    content_id: str | None = None
    part: str | None = None


CALENDAR_PART: Final = "calendar"
RAW_PART: Final = "raw"


class _HasFiles(Protocol):
    @property
    def attachments(self) -> tuple[OutgoingAttachment, ...]: ...
    @property
    def calendar(self) -> OutgoingCalendar | None: ...
    @property
    def raw(self) -> bytes | None: ...


def file_parts(email: _HasFiles) -> list[FilePart]:
    """The attachments, and what is stored like an attachment."""
    parts = [FilePart(each.filename, each.content_type, each.content, each.content_id) for each in email.attachments]
    if (calendar := email.calendar) is not None:
        content_type = f"text/calendar; method={calendar.method}"
        parts.append(FilePart(CALENDAR_FILENAME, content_type, calendar.content.encode(), part=CALENDAR_PART))
    if email.raw is not None:
        parts.append(FilePart("message.eml", "message/rfc822", email.raw, part=RAW_PART))
    return parts


def with_file_parts(email: OutgoingEmail, files: Sequence[FilePart]) -> OutgoingEmail:
    """The email with its parts; the opposite of `file_parts`. Raises ValueError if a row was edited by hand."""
    if not files:
        return email
    attachments = [OutgoingAttachment(*file[:4]) for file in files if file.part is None]
    email = replace(email, attachments=tuple(attachments))
    for file in files:
        if file.part == CALENDAR_PART:
            method = file.content_type.rpartition("=")[2]
            email = replace(email, calendar=OutgoingCalendar(file.content.decode(), method))
        elif file.part == RAW_PART:
            email = replace(email, raw=file.content)
    return email


def without_recipients(email: OutgoingEmail, positions: Container[int]) -> OutgoingEmail:
    """The email without the recipients at these positions, which count from 1 over To, Cc and Bcc."""
    lists: list[tuple[str, ...]] = []
    before = 1
    for addresses in (email.to, email.cc, email.bcc):
        lists.append(tuple([each for at, each in enumerate(addresses, before) if at not in positions]))
        before += len(addresses)
    return replace(email, to=lists[0], cc=lists[1], bcc=lists[2])


def _filename_fault(filename: object) -> str | None:
    if not isinstance(filename, str):
        return "must be a string"
    if len(filename) > MAX_FILENAME_CHARACTERS:
        return f"is longer than {MAX_FILENAME_CHARACTERS} characters"
    if fault := name_fault(filename):
        return fault
    plain = plain_name(filename)
    if not plain.replace(".", "").strip():
        return "must have a character other than dots and spaces"
    return "contains a slash or backslash; give the file name without a path" if "/" in plain or "\\" in plain else None


def _content_id_fault(content_id: object) -> str | None:
    if not isinstance(content_id, str):
        return "must be a string"
    if re.fullmatch(CONTENT_ID_PATTERN, content_id):
        return None
    if content_id.startswith(("<", "cid:")):
        return "must be the bare id, such as logo, without < > and cid:"
    return "must be 1 to 200 ASCII letters, digits or some of . _ - + @ =, such as logo or logo@example.com"


def _content_type_fault(content_type: object) -> str | None:
    if not isinstance(content_type, str):
        return "must be a string"
    # Parameters are not allowed: SendGrid refuses them, and the MIME code sets charset and boundary itself.
    if not _CONTENT_TYPE.fullmatch(content_type):
        return "must be a MIME type without parameters, such as application/pdf"
    # RFC 2046 (5.1, 5.2.1) forbids base64 for these types, but attachments are sent in base64.
    if content_type.lower().startswith(("multipart/", "message/")):
        return "cannot be a multipart or message type; use application/octet-stream"
    return None
