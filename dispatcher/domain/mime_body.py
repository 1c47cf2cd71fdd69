"""Reads the parts of a MIME message into the fields of an email.

    text/plain, text/html                           text, html
    multipart/alternative [text, html, calendar]    text, html, calendar
    multipart/related [html, image, …]              html, and attachments with content ids
    multipart/mixed [the above, file, …]            and attachments

All else is `Lost`: signatures, encryption, reports, attached emails, a part or parameter that is not in this table, and
what Python's parser finds faulty.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from email import policy
from email._policybase import Compat32
from email.message import EmailMessage, Message
from email.parser import BytesParser
from email.policy import EmailPolicy
from functools import lru_cache
from itertools import count
from mimetypes import guess_extension
from typing import Any, Final, cast

from dispatcher.domain.calendar import Calendar
from dispatcher.domain.outgoing import Attachment
from dispatcher.domain.raw_mime import FIELD
from dispatcher.domain.text import shown
from dispatcher.errors import InvalidEmail

MAX_PARTS: Final = 300
MAX_MULTIPARTS: Final = 16
MAX_LINES: Final = 1_000_000
MAX_PART_FIELD_CHARACTERS: Final = 4_000
"""Python's parser takes seconds or minutes for messages beyond these limits, so they are not parsed. An email with the
most and largest attachments is below them."""
FAULTS: Final = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What Python's parser raises for some invalid messages."""
_OF_PARTS: Final = frozenset(
    {
        "content-type",
        "content-transfer-encoding",
        "content-disposition",
        "content-id",
        "x-attachment-id",
        "mime-version",
    }
)
_ENCODINGS: Final = frozenset({"", "7bit", "8bit", "binary", "quoted-printable", "base64"})
_FILE_PARAMETERS: Final = frozenset({"filename", "size", "creation-date", "modification-date", "read-date"})
_CID: Final = re.compile(r"""cid:([^"'\s<>)]{1,500})""", re.IGNORECASE)
_FOREIGN_CHARSETS: Final = frozenset({"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"})
"""Codecs of Python that no mail program has. Python needs hours to decode some megabytes of Punycode."""
_BOUNDARY: Final = re.compile(rb"boundary[\s*0-9]*=", re.IGNORECASE)
_MAX_KEPT_CHARACTERS: Final = 500


@lru_cache(maxsize=32)
def _parsed_header(name: str, value: str) -> Any:
    return policy.default.header_fetch_parse(name, value)


class _CachedPolicy(EmailPolicy):
    """Python's default policy, which would parse a header again at each look at it: a dozen times per message."""

    def header_fetch_parse(self, name: str, value: str) -> Any:
        is_kept = type(value) is str and len(value) <= _MAX_KEPT_CHARACTERS
        return _parsed_header(name, value) if is_kept else super().header_fetch_parse(name, value)


POLICY: Final = cast("EmailPolicy[EmailMessage]", _CachedPolicy())


class Lost(Exception):
    """A part of the message has no field in `Email`. The text says which part: a phrase after "it"."""


class _Bounded:
    """Refuses to read a long header of a part."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        if sum(map(len, sourcelines)) > MAX_PART_FIELD_CHARACTERS and sourcelines[0][:8].lower() == "content-":
            raise Lost("has a part with a long header")
        return super().header_source_parse(sourcelines)  # type: ignore[misc, no-any-return]


class _StrictPolicy(_Bounded, _CachedPolicy):
    pass


class _LenientPolicy(_Bounded, Compat32):
    pass


def _parsed(octets: bytes, make: Callable[..., Any], policy: Any) -> Any:
    """The message with its parts. Raises Lost if it would take too long to read it."""
    if octets.count(b"\n") > MAX_LINES or len(_BOUNDARY.findall(octets)) > MAX_MULTIPARTS:
        raise Lost("has too many lines or parts to be read")
    numbers = count()

    def factory(**given: Any) -> Any:
        if next(numbers) > MAX_PARTS:
            raise Lost("has too many parts to be read")
        return make(**given)

    return BytesParser(factory, policy=policy).parsebytes(octets)


class BodyReader:
    """What the parts of a message say. Raises Lost, and any of FAULTS."""

    def __init__(self, octets: bytes) -> None:
        self.text: str | None = None
        self.html: str | None = None
        self.calendar: Calendar | None = None
        self.attachments: list[Attachment] = []
        self._numbers = count(1)
        self._read(_parsed(octets, EmailMessage, _StrictPolicy()))

    def _read(self, root: EmailMessage) -> None:
        if root.get_content_type() != "multipart/mixed":
            self._body(root, is_root=True)
            return
        body, *files = _parts(root, is_root=True)
        self._body(body)
        used = {found.lower() for found in _CID.findall(self.html or "")}
        for part in files:
            self._file(part, used)

    def _body(self, part: EmailMessage, *, is_root: bool = False, within: str = "") -> None:
        kind = part.get_content_type()
        if kind == "multipart/alternative" and within != kind:
            for each in _parts(part, is_root=is_root):
                self._body(each, within=kind)
        elif kind == "multipart/related":
            first, *images = _parts(part, is_root=is_root, allowed={"type", "start"})
            start = part.get_param("start")
            if start is not None and start != first.get("content-id"):
                raise Lost("has a multipart/related that does not start with its first part")
            self._body(first, within=within)
            for image in images:
                self._file(image, None)
        elif kind == "text/plain" and self.text is None and self.html is None and self.calendar is None:
            self.text = _text(part, is_root=is_root)
        elif kind == "text/html" and self.html is None and self.calendar is None:
            self.html = _text(part, is_root=is_root)
        elif kind == "text/calendar" and within == "multipart/alternative" and self.calendar is None:
            text = _text(part, allowed={"method", "name", "component"})
            try:
                self.calendar = Calendar(text or "", str(part.get_param("method", "")))
            except InvalidEmail as error:
                raise Lost(f"has a calendar that {error.reason}") from None
        else:
            raise Lost(f"has a part {shown(kind)}, or parts in an order, that Email has no field for")

    def _file(self, part: EmailMessage, used: set[str] | None) -> None:
        """Adds an attachment. `used`: the content ids that the HTML shows; None: the part is in multipart/related."""
        content = _content(part, {"name", "charset", "method", "component"})
        kind, disposition = part.get_content_type(), part.get_content_disposition()
        content_id = str(part.get("content-id", "")).strip().removeprefix("<").removesuffix(">") or None
        is_inline = used is None or (
            content_id is not None and content_id.lower() in used and disposition != "attachment"
        )
        if used is None and content_id is None:
            raise Lost("has a part in multipart/related without a Content-ID")
        if kind in ("text/calendar", "application/ics") and self.calendar is not None and self._is_calendar(content):
            return
        if part.get_param("method") is not None or part.get_param("component") is not None:
            raise Lost("has a calendar file that differs from its alternative")
        charset = part.get_param("charset")
        if charset is not None and str(charset).lower() not in ("utf-8", "us-ascii"):
            raise Lost("has a file with a charset")
        if not is_inline and disposition != "attachment" and (disposition == "inline" or part.get_filename() is None):
            raise Lost("has a part that is shown between others")
        name = part.get_filename() or f"attachment-{next(self._numbers)}{guess_extension(kind) or ''}"
        try:
            self.attachments.append(Attachment(name, kind, content, content_id if is_inline else None))
        except InvalidEmail as error:
            raise Lost(f"has a file whose {error.field} {error.reason}") from None

    def _is_calendar(self, content: bytes) -> bool:
        assert self.calendar is not None
        text = content.decode("utf-8", "replace").replace("\r\n", "\n").strip("\n")
        return text == self.calendar.content.replace("\r\n", "\n").strip("\n")


def _parts(part: EmailMessage, *, is_root: bool, allowed: Collection[str] = ()) -> list[EmailMessage]:
    _check(part, {"boundary", *allowed}, is_root=is_root)
    parts = part.get_payload()
    if not isinstance(parts, list) or not parts:
        raise Lost("has a multipart without parts")
    return cast("list[EmailMessage]", parts)


def _text(part: EmailMessage, *, is_root: bool = False, allowed: Collection[str] = ()) -> str | None:
    if part.get_content_disposition() == "attachment" or part.get_filename():
        raise Lost("has a file in the place of its text")
    content = _content(part, {"charset", *allowed}, is_root=is_root)
    try:
        charset = codecs.lookup(str(part.get_param("charset", "us-ascii"))).name
        if charset in _FOREIGN_CHARSETS:
            raise Lost("has a text in a charset that is only Python's")
        # As all mail software reads it: many programs label Windows-1252 as Latin-1.
        return content.decode("cp1252" if charset == "iso8859-1" else charset).replace("\r\n", "\n") or None
    except (LookupError, ValueError):
        raise Lost("has a text that does not fit its charset") from None


def _content(part: EmailMessage, parameters: Collection[str], *, is_root: bool = False) -> bytes:
    if part.is_multipart() or part.get_content_maintype() in ("multipart", "message"):
        raise Lost(f"has a part {shown(part.get_content_type())}")
    content = part.get_payload(decode=True)
    _check(part, parameters, is_root=is_root)  # after the decoding, which finds more defects
    return content if isinstance(content, bytes) else b""


def _check(part: EmailMessage, parameters: Collection[str], *, is_root: bool) -> None:
    """Raises Lost if a part has more than `Email` can say."""
    names = [name.lower() for name in part]
    if not is_root and (unknown := [name for name in names if name not in _OF_PARTS]):
        raise Lost(f"has a part with the header {shown(unknown[0])}")
    defects = [*part.defects, *(defect for name in _OF_PARTS & set(names) for defect in _defects(part, name))]
    if defects or any(names.count(name) > 1 for name in _OF_PARTS):
        raise Lost("has a part that is not valid MIME")
    given = {str(name).lower() for name, _ in part.get_params([], header="content-type")[1:]}
    if foreign := given.difference(parameters):
        raise Lost(f"has a part with the parameter {shown(min(foreign))}")
    files = {str(name).lower() for name, _ in part.get_params([], header="content-disposition")[1:]}
    if foreign := files.difference(_FILE_PARAMETERS):
        raise Lost(f"has a part with the parameter {shown(min(foreign))}")
    if str(part.get("content-transfer-encoding", "")).lower() not in _ENCODINGS:
        raise Lost("has a part with an unknown encoding")


def _defects(part: EmailMessage, name: str) -> Sequence[object]:
    found = getattr(part.get(name), "defects", ())
    # Some mail programs write a file's name as an encoded word in quotes. Everyone decodes it, Python, too.
    return [each for each in found if "encoded word" not in str(each).replace("-", " ")]


def files_in(octets: bytes) -> Iterator[tuple[str, str, int]]:
    """The name, the type and the approximate size of each file in a message; for limits, so also of what is faulty."""
    try:
        for part in _parsed(octets, Message, _LenientPolicy()).walk():
            if not part.is_multipart() and (name := part.get_filename()):
                payload = part.get_payload(decode=True)
                yield str(name), part.get_content_type(), len(payload) if isinstance(payload, bytes) else 0
    except (Lost, *FAULTS):
        raise InvalidEmail(FIELD, "cannot be read, so its files cannot be checked") from None
