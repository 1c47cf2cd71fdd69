"""Reads a MIME message into the arguments of `Email`, if nothing of it is lost; otherwise keeps its octets.

    text/plain, text/html                           text, html
    multipart/alternative [text, html, calendar]    text, html, calendar
    multipart/related [html, image, …]              html, and attachments with content ids
    multipart/mixed [the above, file, …]            and attachments

Every header becomes an additional header, except for those that every transmission writes anew (see `_REPLACED`). What
has no field in `Email` is kept raw: signatures, encryption, reports, attached emails, a part or parameter that is not
in this table, a header that occurs twice, recipients that differ from To and Cc. So is what Python's parser finds
faulty.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from email import policy
from email._policybase import Compat32
from email.headerregistry import AddressHeader
from email.message import EmailMessage, Message
from email.parser import BytesParser, HeaderParser
from email.policy import EmailPolicy
from functools import lru_cache
from itertools import count
from mimetypes import guess_extension
from typing import Any, Final, Protocol, cast

from dispatcher.domain.address import parse_address
from dispatcher.domain.calendar import Calendar
from dispatcher.domain.email_rules import MAX_RECIPIENTS
from dispatcher.domain.email_rules import addresses as checked_addresses
from dispatcher.domain.headers import HEADER_KINDS, HeaderKind, header_name_fault, is_reserved
from dispatcher.domain.outgoing import Attachment
from dispatcher.domain.raw_mime import FIELD, MAX_LINE_OCTETS, MAX_RAW_OCTETS, head_of, raw_fault, raw_octets
from dispatcher.domain.text import header_fault, shown
from dispatcher.errors import InvalidEmail

MAX_PARTS: Final = 300
MAX_MULTIPARTS: Final = 16
MAX_LINES: Final = 1_000_000
MAX_PART_FIELD_CHARACTERS: Final = 4_000
MAX_MAILBOX_CHARACTERS: Final = 400
MAX_CHARACTERS_BETWEEN_COMMAS: Final = 1000
MAX_HEADERS: Final = 500
"""Python's parser takes seconds or minutes for messages beyond these limits, so they are not parsed. An email with the
most and largest attachments is below them."""
_REPLACED: Final = frozenset({"date", "message-id", "mime-version", "bcc", "received", "return-path"})
"""Headers that a transmission writes anew, or that are for earlier servers only."""
_READ: Final = frozenset({"from", "to", "cc", "reply-to", "subject", "content-type", "content-transfer-encoding"})
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
_SENDERS: Final = ("from", "sender", "resent-from", "resent-sender")
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\((?:[^()\\]|\\.)*\)', re.DOTALL)
"""A quoted string, or a comment."""
_CID: Final = re.compile(r"""cid:([^"'\s<>)]{1,500})""", re.IGNORECASE)
_FAULTS: Final = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What Python's parser raises for some invalid messages."""
_FOREIGN_CHARSETS: Final = frozenset({"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"})
"""Codecs of Python that no mail program has. Python needs hours to decode some megabytes of Punycode."""
_URL: Final = re.compile("<[^<>]*>")
_SPACE_BEFORE_COLON: Final = re.compile(rb"^([!-9;-~]+)[ \t]+:", re.MULTILINE)
_CONTENT_TYPE: Final = re.compile(rb"^content-type:.*\n(?:[ \t].*\n)*", re.MULTILINE | re.IGNORECASE)
_OUTSIDE: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[^"(),;]+|.', re.DOTALL)
_SLOW: Final = frozenset('"([')
_IN_COMMENT: Final = re.compile(r"\\.|[^\\()]+|.", re.DOTALL)
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


_POLICY: Final = cast("EmailPolicy[EmailMessage]", _CachedPolicy())


class AnyEnvelope(Protocol):
    @property
    def raw(self) -> bytes | None: ...
    @property
    def to(self) -> Sequence[str]: ...
    @property
    def cc(self) -> Sequence[str]: ...
    @property
    def bcc(self) -> Sequence[str]: ...


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


def octets_of_message(message: bytes | Message) -> bytes:
    if isinstance(message, bytes):
        return message
    if not isinstance(message, Message):
        raise InvalidEmail(FIELD, "must be bytes or an email.message.EmailMessage")
    # A folded URL would get spaces or become encoded words; what was parsed from octets keeps its folding.
    changes: dict[str, Any] = {"linesep": "\r\n", "max_line_length": 998}
    if isinstance(message.policy, EmailPolicy):
        changes |= {"refold_source": "none"}
    try:
        # Not `message.as_bytes`: that of Django 5.2 takes no policy.
        return Message.as_bytes(message, policy=message.policy.clone(**changes))
    except _FAULTS as error:
        raise InvalidEmail(FIELD, f"cannot be written as MIME ({type(error).__name__})") from None


class MimeIn:
    """A MIME message that comes in. Raises InvalidEmail, which quotes nothing of it."""

    def __init__(self, octets: bytes, recipients: str | Sequence[str] | None, allowed_headers: Collection[str]) -> None:
        if len(octets) > MAX_RAW_OCTETS:
            raise InvalidEmail(FIELD, f"is larger than {MAX_RAW_OCTETS} bytes")
        self._octets = octets
        self._allowed = allowed_headers
        self._read: dict[str, list[AddressHeader]] = {}
        try:
            self._head = _head_in(octets)
            sender = self._addresses("from")
            if len(self._head.get_all("from", [])) != 1 or len(sender) != 1:
                raise InvalidEmail(FIELD, "needs exactly one header From, with one address")
            self._to, self._cc, bcc = (self._addresses(each) for each in ("to", "cc", "bcc"))
        except UnicodeDecodeError:
            raise InvalidEmail(FIELD, "has a header that is neither ASCII nor UTF-8") from None
        except _FAULTS:
            raise InvalidEmail(FIELD, "has a header with addresses that cannot be read") from None
        self._sender = sender[0]
        shown_specs = [_spec(each) for each in (*self._to, *self._cc)]
        if recipients is None:
            if any(name.lower().startswith("resent-") for name in self._head):
                raise InvalidEmail("recipients", "is required for a message that has headers Resent-*")
            self._missing = False
            self._bcc = bcc
        else:
            given = checked_addresses("recipients", recipients)
            specs = {_spec(each) for each in given}
            self._missing = not specs.issuperset(shown_specs)
            self._to = [each for each in self._to if _spec(each) in specs]
            self._cc = [each for each in self._cc if _spec(each) in specs]
            self._bcc = [each for each in given if _spec(each) not in shown_specs]

    def raw(self) -> dict[str, Any]:
        """The arguments of an email that is sent as it is."""
        octets = raw_octets(self._octets)
        if fault := raw_fault(octets, self._allowed):
            raise InvalidEmail(FIELD, fault)
        try:
            subject = self._text("subject")
        except Lost:
            subject = ""
        lists = {"to": self._to, "cc": self._cc, "bcc": self._bcc}
        envelope = {name: [_bare(each) for each in listed] for name, listed in lists.items()}
        return {"sender": _bare(self._sender), **envelope, "subject": subject, "raw": octets}

    def fields(self) -> dict[str, Any]:
        """The arguments of an equal email without `raw`. Raises Lost if there is none."""
        try:
            self._check_groups()
            headers = self._headers()
            body = _BodyReader()
            body.read(_parsed(self._octets, EmailMessage, _StrictPolicy()))
            return {
                "sender": self._sender,
                "to": self._to,
                "cc": self._cc,
                "bcc": self._bcc,
                "reply_to": self._addresses("reply-to"),
                "subject": self._text("subject"),
                "headers": headers,
                "text": body.text,
                "html": body.html,
                "calendar": body.calendar,
                "attachments": body.attachments,
            }
        except _FAULTS as error:
            raise Lost(f"cannot be read completely ({type(error).__name__})") from None

    def _headers(self) -> dict[str, str]:
        if self._missing:
            raise Lost("names recipients in To or Cc who do not get it")
        names = [name.lower() for name in self._head]
        if len(names) > MAX_HEADERS:
            raise Lost("has too many headers to be read")
        kept: dict[str, str] = {}
        for name in self._head:
            lowered = name.lower()
            if lowered != "received" and names.count(lowered) > 1:
                raise Lost(f"has the header {shown(name)} twice")
            if lowered in _REPLACED or lowered in _READ:
                continue
            if lowered == "sender" and [_spec(each) for each in self._addresses(lowered)] == [_spec(self._sender)]:
                continue
            if is_reserved(lowered):
                raise Lost(f"has the header {shown(name)}")
            if fault := header_name_fault(name, self._allowed):
                raise InvalidEmail(f"headers.{shown(name)}", fault)
            kept[name] = self._text(name)
        return kept

    def _check_groups(self) -> None:
        """Raises Lost for a named group of recipients, except for an empty one that is alone."""
        for name in ("to", "cc", "reply-to"):
            for each in self._fields_of(name):
                groups = [group for group in each.groups if group.display_name is not None]
                if groups and (len(each.groups) > 1 or groups[0].addresses or (name != "to" or self._cc)):
                    raise Lost(f"has a group in {name}")

    def _text(self, name: str) -> str:
        value = self._head.get(name)
        if value is None:
            return ""
        text = str(value).replace("\t", " ").strip()
        if HEADER_KINDS.get(name.lower()) is HeaderKind.URLS:  # a URL has no spaces, except for those of its folding
            text = _URL.sub(lambda found: found[0].replace(" ", ""), text)
        if getattr(value, "defects", ()) or "\N{REPLACEMENT CHARACTER}" in text or header_fault(text):
            raise Lost(f"has a header {shown(name)} that cannot be decoded")
        return text

    def _addresses(self, name: str) -> list[str]:
        found = [address for value in self._fields_of(name) for address in value.addresses]
        if any(not each.domain for each in found):
            raise InvalidEmail(FIELD, f"has an address without @ in {name}")
        return [_address(each.display_name, each.addr_spec) for each in found]

    def _fields_of(self, name: str) -> list[AddressHeader]:
        if name not in self._read:
            self._read[name] = _address_fields(self._head, name)
        return self._read[name]


def _head_in(octets: bytes) -> EmailMessage:
    # Python's parser would read no header from one with a space before its colon on, and other mail software all.
    # It would parse the type, which only the parser of the parts needs: for a second, if the type is long.
    head = _CONTENT_TYPE.sub(b"", _SPACE_BEFORE_COLON.sub(rb"\1:", head_of(octets))).decode()
    return HeaderParser(policy=_POLICY).parsestr(head)


def _address_fields(head: EmailMessage, name: str) -> list[AddressHeader]:
    source = [str(value) for each, value in head.raw_items() if each.lower() == name]
    if sum(map(len, source)) > 1000 + MAX_MAILBOX_CHARACTERS * sum(value.count("@") for value in source) or any(
        map(_takes_long, source)
    ):
        raise InvalidEmail(FIELD, f"has a header {name} that is too long for its addresses")
    return [value for value in head.get_all(name, []) if isinstance(value, AddressHeader)]


def _takes_long(value: str) -> bool:
    """Whether Python's parser takes the square of the length: of a text without comma, or of quotes without spaces."""
    at = begin = depth = separators = 0
    while at < len(value):
        found = (_IN_COMMENT if depth else _OUTSIDE).match(value, at)
        assert found is not None
        text, at = found[0], found.end()
        depth += (text == "(") - (text == ")" and depth > 0)
        if text in (",", ";") and not depth:
            if at - begin > MAX_CHARACTERS_BETWEEN_COMMAS:
                return True
            begin, separators = at, separators + 1
    has_long_word = any(len(word) > MAX_LINE_OCTETS and not _SLOW.isdisjoint(word) for word in value.split())
    return has_long_word or at - begin > MAX_CHARACTERS_BETWEEN_COMMAS or separators > 2 * MAX_RECIPIENTS


def _address(name: str, spec: str) -> str:
    if not name:
        return spec
    escaped = name.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}" <{spec}>'


def _bare(address: str) -> str:
    return address[address.rfind("<") + 1 :].removesuffix(">")


def _spec(address: str) -> str:
    """The address for a comparison. An address that is not valid compares as it is; `Email` refuses it later."""
    try:
        found = parse_address(address)
    except ValueError:
        return address
    return f"{found.local}@{found.domain.lower()}"


class _BodyReader:
    """Reads the parts below the head. Raises Lost."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.html: str | None = None
        self.calendar: Calendar | None = None
        self.attachments: list[Attachment] = []
        self._numbers = count(1)

    def read(self, root: EmailMessage) -> None:
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


def why_raw(email: AnyEnvelope) -> str:
    """Why a message was kept raw: a phrase after "it"."""
    assert email.raw is not None
    try:
        MimeIn(email.raw, [*email.to, *email.cc, *email.bcc], ()).fields()
    except Lost as lost:
        return str(lost)
    except InvalidEmail as error:
        return error.reason
    return "has content that an email cannot have otherwise"


def senders_in(octets: bytes) -> list[str]:
    """The addresses in From, Sender, Resent-From and Resent-Sender of a message that `MimeIn` has read."""
    try:
        head = _head_in(octets)
        fields = [each for name in _SENDERS for each in _address_fields(head, name)]
        found = [address.addr_spec for each in fields for address in each.addresses]
    except _FAULTS:
        raise InvalidEmail(FIELD, "has a header with senders that cannot be read") from None
    source = [str(value) for name, value in head.raw_items() if name.lower() in _SENDERS]
    if sum(_QUOTED.sub("", each).count("@") for each in source) != sum("@" in each for each in found):
        # Of `a@example.com <b@example.com>`, Python reads the first address, and mail programs the second.
        raise InvalidEmail(FIELD, "has senders that mail programs read differently; put an address in a name in quotes")
    return found


def files_in(octets: bytes) -> Iterator[tuple[str, str, int]]:
    """The name, the type and the approximate size of each file in a message; for limits, so also of what is faulty."""
    try:
        for part in _parsed(octets, Message, _LenientPolicy()).walk():
            if not part.is_multipart() and (name := part.get_filename()):
                payload = part.get_payload(decode=True)
                yield str(name), part.get_content_type(), len(payload) if isinstance(payload, bytes) else 0
    except (Lost, *_FAULTS):
        raise InvalidEmail(FIELD, "cannot be read, so its files cannot be checked") from None
