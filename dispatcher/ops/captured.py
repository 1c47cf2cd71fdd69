"""Finds, reads and deletes the emails and SMS that the providers `capture` and `sms-capture` have written into their
Maildirs.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.message import Message
from email.parser import BytesHeaderParser, BytesParser
from email.policy import compat32
from email.utils import getaddresses
from itertools import islice
from mimetypes import guess_extension
from pathlib import Path
from typing import Final

import orjson

from dispatcher.config import Settings
from dispatcher.events.bounce_text import decoded, unfolded
from dispatcher.events.bounce_text import field as field_of
from dispatcher.ops.email_check import Finding, Link, check
from dispatcher.providers.capture import NAME as CAPTURE
from dispatcher.providers.capture import CaptureSettings
from dispatcher.providers.sms_capture import NAME as SMS_CAPTURE
from dispatcher.providers.sms_capture import SmsCaptureSettings

FOLDERS: Final = ("new", "cur")
"""The folders of a Maildir that contain emails. A mail client moves the emails that it has shown from `new` to `cur`,
and appends flags to the names of their files."""
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_SEARCHED_BYTES: Final = 1024 * 1024
"""A search for words looks only at the beginning of each email."""
MAX_SEARCHED: Final = 1000
"""A search looks at so many emails at a time."""
MAX_EMAIL_BYTES: Final = 64 * 1024 * 1024
MAX_PARTS: Final = 1000
MAX_FIELDS: Final = 200
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
    """The name of a captured email's file, without a mail client's flags. `captured_ns`: nanoseconds since 1970."""

    text: str
    email_id: str
    captured_ns: int

    @property
    def is_sms(self) -> bool:
        return self.text.endswith(".json")

    @property
    def captured_at(self) -> datetime:
        return datetime.fromtimestamp(self.captured_ns / 1e9, UTC)


@dataclass(frozen=True, slots=True)
class CapturedFilter:
    """Selects the captured emails that match everything given, in upper or lower case. `known` are emails that do not
    match, as earlier searches with this filter found."""

    to: str = ""
    subject: str = ""
    text: str = ""
    after_ns: int = -1
    before_ns: int = 1 << 64
    known: set[CapturedName] = field(default_factory=set, compare=False)

    def selects(self, row: CapturedRow, message: Message) -> bool:
        to, subject, text = self.to.casefold(), self.subject.casefold(), self.text.casefold()
        is_to = to in (map(str.casefold, row.recipients) if "@" in to[1:] else row.to.casefold())
        if not (is_to and subject in row.subject.casefold()):
            return False
        return any(text in each.casefold() for each in (row.sender, row.to, row.subject)) or any(
            text in decoded(part).casefold()
            for part in islice(_leaves(message), MAX_PARTS)
            if part.get_content_maintype() == "text"
        )


@dataclass(frozen=True, slots=True)
class CapturedRow:
    """A captured email, as a list shows it.

    Attributes:
        to: The fields To and Cc; `recipients`: their addresses, or the number of an SMS.
        is_read: It was opened on the page, or by a mail client.
    """

    id: str
    email_id: str
    captured_at: datetime
    sender: str
    to: str
    recipients: list[str]
    subject: str
    byte_count: int
    is_read: bool


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
class CapturedMessage(CapturedRow):
    """A captured email with its content, without what is only for the page.

    Attributes:
        headers: The first 200 header fields, as pairs of a name and a decoded value; of an SMS none.
        text: The plain text, and `html` the HTML; None if the email has none.
    """

    headers: list[tuple[str, str]]
    text: str | None
    html: str | None
    findings: list[Finding]
    links: list[Link]
    attachments: list[Attachment]


@dataclass(frozen=True, slots=True)
class CapturedEmail:
    """A captured email, as the page shows it.

    Attributes:
        fields: The most important header fields, decoded.
        framed: The HTML, with the email's own images as data URLs.
        source: The content of the file: the email as it would have been transmitted, or the SMS as JSON.
    """

    name: CapturedName
    message: CapturedMessage
    fields: Sequence[tuple[str, str]]
    framed: str | None
    source: bytes


def parse_name(text: str) -> CapturedName | None:
    """The parsed name; None if the text is not the name of a captured email's file, but for example a path."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    captured_ns = int(found[2])
    # Python's datetime cannot represent a later time than this limit, the end of the year 9999.
    return CapturedName(text, found[1], captured_ns) if captured_ns < 253_402_300_799 * 10**9 else None


def folders_of(settings: Settings) -> list[Path] | None:
    """The Maildirs of the configured capture providers; None if no provider captures. All tenants share them."""
    found = {CAPTURE: settings.of(CaptureSettings).dir, SMS_CAPTURE: settings.of(SmsCaptureSettings).dir}
    if found.keys().isdisjoint(settings.providers):
        return None
    return [folder for name, folder in found.items() if name in settings.providers and folder is not None]


def delivers_nothing(settings: Settings) -> bool:
    return {CAPTURE, SMS_CAPTURE}.issuperset(settings.providers)


def find_captured(
    folders: Sequence[Path], wanted: CapturedFilter, *, limit: int, is_oldest_first: bool = False
) -> tuple[list[CapturedRow], CapturedName | None]:
    """The newest emails and SMS that match, newest first, and the email before which the search continues; None at its
    end. A Maildir that does not exist counts as empty.

    Raises OSError if this process may not read the folder.
    """
    entries = [
        each
        for each in _entries(folders)
        if wanted.after_ns < each[0].captured_ns < wanted.before_ns and each[0] not in wanted.known
    ]
    entries.sort(key=lambda each: (each[0].captured_ns, each[0].text), reverse=not is_oldest_first)
    found: list[CapturedRow] = []
    for count, (name, path) in enumerate(entries):
        if len(found) == limit or count == MAX_SEARCHED:
            return found, entries[count - 1][0]
        if (row := _matching(folders, name, path, wanted)) is None:
            wanted.known.add(name)
        else:
            found.append(row)
    return found, None


def read_captured(folders: Sequence[Path], name: CapturedName) -> CapturedEmail | None:
    """The captured email with this name; None if its file does not exist any more. Raises OSError if this process may
    not read the file."""
    source = _read(folders, name, MAX_EMAIL_BYTES)
    if source is None:
        return None
    message = _parsed(name, source[0])
    parts = list(islice(_leaves(message), MAX_PARTS))
    bodies = {kind: _body(parts, f"text/{kind}") for kind in ("plain", "html")}
    text, html = (None if part is None else _clean(decoded(part)) for part in bodies.values())
    used = {id(part) for part in bodies.values() if part is not None}
    headers = [] if name.is_sms else islice(message.items(), MAX_FIELDS)
    row = _row(name, message, len(source[0]), is_read=True)
    return CapturedEmail(
        name,
        CapturedMessage(
            **asdict(row),
            headers=[(_clean(each), _clean(unfolded(str(value)))) for each, value in headers],
            text=text,
            html=html,
            **check(html, text)._asdict(),
            attachments=[_attachment(number, part) for number, part in enumerate(parts) if id(part) not in used],
        ),
        fields=[(each, value) for each in SHOWN_FIELDS if (value := _clean(field_of(message, each)))],
        framed=None if html is None else with_images(html, _images_of(parts)),
        source=source[0],
    )


def mark_read(folders: Sequence[Path], name: CapturedName) -> None:
    """Moves an email to `cur` with the flag S, as mail clients do. Does nothing if this process may not."""
    for folder in folders:
        with suppress(OSError):
            (folder / "new" / name.text).rename(folder / "cur" / f"{name.text}:2,S")


def delete_captured(folders: Sequence[Path], name: CapturedName | None = None) -> int:
    """Deletes an email, or all; returns how many files were deleted. Idempotent."""
    deleted = 0
    for path in [path for each, path in _entries(folders) if name in (None, each)]:
        with suppress(FileNotFoundError):
            Path(path).unlink()
            deleted += 1
    return deleted


def _entries(folders: Sequence[Path]) -> Iterator[tuple[CapturedName, str]]:
    for sub in [folder / each for folder in folders for each in FOLDERS]:
        try:
            with os.scandir(sub) as entries:
                for entry in entries:
                    if name := parse_name(entry.name.partition(":2,")[0]):
                        yield name, entry.path
        except FileNotFoundError:
            continue


def _matching(folders: Sequence[Path], name: CapturedName, path: str, wanted: CapturedFilter) -> CapturedRow | None:
    """The email in a file; None if the file does not exist any more, or does not match."""
    found = _read(folders, name, MAX_SEARCHED_BYTES if wanted.text else MAX_HEADER_BYTES, first=path)
    if found is None:
        return None
    message = _parsed(name, found[0], only_header=not wanted.text)
    row = _row(name, message, found[1], is_read="S" in path.rpartition("/")[2].partition(":2,")[2])
    return row if wanted.selects(row, message) else None


def _row(name: CapturedName, message: Message, byte_count: int, *, is_read: bool) -> CapturedRow:
    sender, to, cc, subject = (_clean(field_of(message, each)) for each in ("From", "To", "Cc", "Subject"))
    to, recipients = ", ".join(filter(None, (to, cc))), []
    with suppress(RecursionError):  # thousands of parentheses
        recipients = [address for _, address in getaddresses([to]) if address]
    return CapturedRow(name.text, name.email_id, name.captured_at, sender, to, recipients, subject, byte_count, is_read)


def _parsed(name: CapturedName, source: bytes, *, only_header: bool = False) -> Message:
    if name.is_sms:
        return _sms(source)
    if not only_header:
        with suppress(RecursionError):  # hundreds of parts in parts
            return BytesParser(policy=compat32).parsebytes(source)
    return BytesHeaderParser(policy=compat32).parsebytes(source)


def _clean(text: str) -> str:
    """The text without lone surrogates, which some charsets decode to and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


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


def _read(
    folders: Sequence[Path], name: CapturedName, at_most: int, *, first: str | None = None
) -> tuple[bytes, int] | None:
    """The beginning and the size of an email's file; None if the file does not exist. Follows no symbolic link."""
    paths = [str(folder / "new" / name.text) for folder in folders] if first is None else [first]
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
        with suppress(RecursionError):  # hundreds of emails in emails
            return b"".join(each.as_bytes() for each in part.get_payload() if isinstance(each, Message))
        return b""
    content = part.get_payload(decode=True)
    return content if isinstance(content, bytes) else b""


def _images_of(parts: Iterable[Message]) -> Iterator[tuple[str, str, bytes]]:
    for part in parts:
        content_id = str(part.get("Content-ID", "")).strip().removeprefix("<").removesuffix(">")
        if content_id and part.get_content_type() in INLINE_IMAGES:
            yield content_id, part.get_content_type(), _content(part)


def with_images(html: str, files: Iterable[tuple[str | None, str, bytes]]) -> str:
    """Replaces references to the email's own images by data URLs, because a page in a sandbox loads nothing. `files`:
    their content ids, types and contents."""
    images: dict[str, str] = {}
    left = MAX_INLINE_IMAGE_BYTES
    for content_id, content_type, content in files:
        if content_id is not None and content_type in INLINE_IMAGES and len(content) <= left:
            left -= len(content)
            images[content_id] = f"data:{content_type};base64,{b64encode(content).decode()}"
    left = MAX_EMAIL_BYTES

    def embedded(found: re.Match[str]) -> str:
        nonlocal left
        url = images.get(found[1], found[0])
        left -= len(url)  # an email may repeat an image thousands of times
        return url if left > 0 else found[0]

    return _REFERENCE.sub(embedded, html) if images else html
