"""Reads the emails and SMS that the providers `capture` and `sms-capture` have written into their Maildirs.

An SMS is shown as an email whose subject is the beginning of the SMS's text.

The emails are untrusted. So every function reads a limited number of bytes, and no content of an email decides which
file is read.
"""

from __future__ import annotations

import errno
import os
import re
import unicodedata
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.parser import BytesHeaderParser, BytesParser
from email.policy import compat32
from heapq import nlargest
from itertools import islice
from mimetypes import guess_extension
from pathlib import Path
from typing import Final

import orjson

from dispatcher.events.bounce_text import decoded, field

FOLDERS: Final = ("new", "cur")
"""The folders of a Maildir that contain emails. A mail client moves the emails that it has shown from `new` to `cur`,
and appends flags to the names of their files."""
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_EMAIL_BYTES: Final = 64 * 1024 * 1024
MAX_PARTS: Final = 1000
MAX_INLINE_IMAGE_BYTES: Final = 2 * 1024 * 1024
INLINE_IMAGES: Final = frozenset({"image/gif", "image/jpeg", "image/png", "image/webp"})
SHOWN_FIELDS: Final = ("From", "To", "Cc", "Reply-To", "Subject", "Date", "Message-ID", "Segments")
SUBJECT_CHARACTERS: Final = 80

_NAME: Final = re.compile(
    r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.([0-9]{1,20})\.([0-9]{1,10})\.(?:eml|json)", re.ASCII
)
_REFERENCE: Final = re.compile(r"""cid:([^"'\s<>)]{1,500})""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CapturedName:
    """The name of a captured email's file.

    Attributes:
        text: The name, without a mail client's flags.
        captured_ns: When the email was captured, in nanoseconds since 1970.
    """

    text: str
    email_id: str
    captured_ns: int

    @property
    def is_sms(self) -> bool:
        """Whether the file contains an SMS."""
        return self.text.endswith(".json")

    @property
    def captured_at(self) -> datetime:
        return datetime.fromtimestamp(self.captured_ns / 1e9, UTC)


@dataclass(frozen=True, slots=True)
class CapturedSummary:
    """A captured email, as a list shows it."""

    name: CapturedName
    sender: str
    recipients: str
    subject: str
    byte_count: int


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file in an email.

    Attributes:
        number: The number of the MIME part in the email, from 0; parts that contain other parts are not counted.
        filename: Safe to use as the name of a file.
    """

    number: int
    filename: str
    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class CapturedEmail:
    """A captured email.

    Attributes:
        fields: The most important header fields, decoded.
        text: The plain text; None if the email has none.
        html: The HTML, with its embedded images as data URLs; None if the email has no HTML.
        source: The content of the file: the email as it would have been transmitted, or the SMS as JSON.
    """

    name: CapturedName
    fields: Sequence[tuple[str, str]]
    text: str | None
    html: str | None
    attachments: Sequence[Attachment]
    source: bytes


def parse_name(text: str) -> CapturedName | None:
    """The parsed name; None if the text is not the name of a captured email's file, but for example a path."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    captured_ns = int(found[2])
    # Python's datetime cannot represent a later time than this limit, the end of the year 9999.
    return CapturedName(text, found[1], captured_ns) if captured_ns < 253_402_300_799 * 10**9 else None


def list_captured(folders: Sequence[Path], *, limit: int, before_ns: int | None = None) -> list[CapturedSummary]:
    """The newest emails and SMS before a time, newest first. A Maildir that does not exist counts as empty.

    Raises OSError if this process may not read the folder.
    """
    names = (name for name, _path in _entries(folders) if before_ns is None or name.captured_ns < before_ns)
    newest = nlargest(limit, names, key=lambda name: (name.captured_ns, name.text))
    return [summary for name in newest if (summary := _summary(folders, name)) is not None]


def read_captured(folders: Sequence[Path], name: CapturedName) -> CapturedEmail | None:
    """The captured email with this name; None if its file does not exist any more. Raises OSError if this process may
    not read the file."""
    source = _read(folders, name, MAX_EMAIL_BYTES)
    if source is None:
        return None
    message = _sms(source[0]) if name.is_sms else BytesParser(policy=compat32).parsebytes(source[0])
    parts = list(islice(_leaves(message), MAX_PARTS))
    bodies = {kind: _body(parts, f"text/{kind}") for kind in ("plain", "html")}
    html = bodies["html"]
    used = {id(part) for part in bodies.values() if part is not None}
    return CapturedEmail(
        name=name,
        fields=[(each, value) for each in SHOWN_FIELDS if (value := field(message, each))],
        text=None if bodies["plain"] is None else decoded(bodies["plain"]),
        html=None if html is None else _with_images(decoded(html), parts),
        attachments=[_attachment(number, part) for number, part in enumerate(parts) if id(part) not in used],
        source=source[0],
    )


def _entries(folders: Sequence[Path]) -> Iterator[tuple[CapturedName, str]]:
    for sub in [folder / each for folder in folders for each in FOLDERS]:
        try:
            with os.scandir(sub) as entries:
                for entry in entries:
                    if name := parse_name(entry.name.partition(":2,")[0]):
                        yield name, entry.path
        except FileNotFoundError:
            continue


def _summary(folders: Sequence[Path], name: CapturedName) -> CapturedSummary | None:
    found = _read(folders, name, MAX_HEADER_BYTES)
    if found is None:
        return None
    message = _sms(found[0]) if name.is_sms else BytesHeaderParser(policy=compat32).parsebytes(found[0])
    recipients = ", ".join(value for each in ("To", "Cc") if (value := field(message, each)))
    return CapturedSummary(name, field(message, "From"), recipients, field(message, "Subject"), found[1])


def _sms(source: bytes) -> Message:
    """The SMS in a file, as an email message. If the file is not valid JSON, the message has no fields."""
    try:
        found = orjson.loads(source)
    except orjson.JSONDecodeError:
        found = None
    message = Message(policy=compat32)
    if isinstance(found, dict):
        text = str(found.get("text", ""))
        message["From"], message["To"] = str(found.get("from") or "(the provider's default)"), str(found.get("to", ""))
        message["Subject"] = " ".join(text.split())[:SUBJECT_CHARACTERS]
        message["Segments"] = f"{found.get('segments')} ({found.get('alphabet')})"
        message.set_payload(text, "utf-8")
    return message


def _read(folders: Sequence[Path], name: CapturedName, at_most: int) -> tuple[bytes, int] | None:
    """The beginning and the size of an email's file; None if the file does not exist. Follows no symbolic link."""
    paths = [str(folder / "new" / name.text) for folder in folders]
    for look in (False, True):
        if look:  # a mail client may have moved the file to `cur`
            paths = [path for found, path in _entries(folders) if found == name]
        for path in paths:
            try:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):
                    continue
                raise
            with os.fdopen(file, "rb") as opened:
                return opened.read(at_most), os.fstat(opened.fileno()).st_size
    return None


def _leaves(message: Message) -> Iterator[Message]:
    """The parts that contain no other parts. An attached email counts as one part."""
    if message.get_content_maintype() != "multipart" or not message.is_multipart():
        yield message
        return
    for part in message.get_payload():
        if isinstance(part, Message):
            yield from _leaves(part)


def _body(parts: Sequence[Message], media_type: str) -> Message | None:
    """The first part of this type that is not an attachment."""
    texts = (part for part in parts if part.get_content_type() == media_type)
    return next((part for part in texts if part.get_content_disposition() != "attachment"), None)


def _attachment(number: int, part: Message) -> Attachment:
    try:
        filename = part.get_filename("") or ""
    except (LookupError, ValueError):
        filename = ""
    # No folders, and no characters that control a terminal or reverse the text's direction.
    name = filename.replace("\\", "/").rpartition("/")[2]
    name = "".join(c for c in name if unicodedata.category(c)[0] != "C" and c not in '<>:"|?*').strip(" .")[-150:]
    name = name or f"part-{number}{guess_extension(part.get_content_type()) or ''}"
    return Attachment(number, name, part.get_content_type(), _content(part))


def _content(part: Message) -> bytes:
    """The decoded content of a part; for an attached email, the source of that email."""
    if part.is_multipart():
        return b"".join(each.as_bytes() for each in part.get_payload() if isinstance(each, Message))
    content = part.get_payload(decode=True)
    return content if isinstance(content, bytes) else b""


def _with_images(html: str, parts: Sequence[Message]) -> str:
    """Replaces references to the email's own images by data URLs, because a page in a sandbox loads nothing."""
    images: dict[str, str] = {}
    left = MAX_INLINE_IMAGE_BYTES
    for part in parts:
        content_id = str(part.get("Content-ID", "")).strip().removeprefix("<").removesuffix(">")
        if content_id and part.get_content_type() in INLINE_IMAGES and len(content := _content(part)) <= left:
            left -= len(content)
            images[content_id] = f"data:{part.get_content_type()};base64,{b64encode(content).decode()}"
    if not images:
        return html
    return _REFERENCE.sub(lambda found: images.get(found[1], found[0]), html)
