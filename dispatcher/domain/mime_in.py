"""Reads a MIME message into the arguments of `Email`, if nothing of it is lost; otherwise keeps its octets.

Every header becomes an additional header, except for those that every transmission writes anew (see `_REPLACED`). A
message is kept raw if a part has no field in `Email` (see `mime_body`), a header occurs twice, the recipients differ
from To and Cc, or Python's parser finds a fault.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from email.headerregistry import AddressHeader
from email.message import EmailMessage, Message
from email.parser import HeaderParser
from email.policy import EmailPolicy
from typing import Any, Final, Protocol

from dispatcher.domain.address import parse_address
from dispatcher.domain.email_rules import MAX_RECIPIENTS
from dispatcher.domain.email_rules import addresses as checked_addresses
from dispatcher.domain.headers import HEADER_KINDS, HeaderKind, header_name_fault, is_reserved
from dispatcher.domain.mime_body import FAULTS, POLICY, BodyReader, Lost
from dispatcher.domain.raw_mime import FIELD, MAX_LINE_OCTETS, MAX_RAW_OCTETS, head_of, raw_fault, raw_octets
from dispatcher.domain.text import header_fault, shown
from dispatcher.errors import InvalidEmail

MAX_MAILBOX_CHARACTERS: Final = 400
MAX_CHARACTERS_BETWEEN_COMMAS: Final = 1000
MAX_HEADERS: Final = 500
"""Python's parser takes seconds or minutes for headers beyond these limits, so they are not parsed."""
_REPLACED: Final = frozenset({"date", "message-id", "mime-version", "bcc", "received", "return-path"})
"""Headers that a transmission writes anew, or that are for earlier servers only."""
_READ: Final = frozenset({"from", "to", "cc", "reply-to", "subject", "content-type", "content-transfer-encoding"})
_SENDERS: Final = ("from", "sender", "resent-from", "resent-sender")
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\((?:[^()\\]|\\.)*\)', re.DOTALL)
"""A quoted string, or a comment."""
_URL: Final = re.compile("<[^<>]*>")
_SPACE_BEFORE_COLON: Final = re.compile(rb"^([!-9;-~]+)[ \t]+:", re.MULTILINE)
_CONTENT_TYPE: Final = re.compile(rb"^content-type:.*\n(?:[ \t].*\n)*", re.MULTILINE | re.IGNORECASE)
_OUTSIDE: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[^"(),;]+|.', re.DOTALL)
_SLOW: Final = frozenset('"([')
_IN_COMMENT: Final = re.compile(r"\\.|[^\\()]+|.", re.DOTALL)


class AnyEnvelope(Protocol):
    @property
    def raw(self) -> bytes | None: ...
    @property
    def to(self) -> Sequence[str]: ...
    @property
    def cc(self) -> Sequence[str]: ...
    @property
    def bcc(self) -> Sequence[str]: ...


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
    except FAULTS as error:
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
        except FAULTS:
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
            body = BodyReader(self._octets)
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
        except FAULTS as error:
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
    return HeaderParser(policy=POLICY).parsestr(head)


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
    except FAULTS:
        raise InvalidEmail(FIELD, "has a header with senders that cannot be read") from None
    source = [str(value) for name, value in head.raw_items() if name.lower() in _SENDERS]
    if sum(_QUOTED.sub("", each).count("@") for each in source) != sum("@" in each for each in found):
        # Of `a@example.com <b@example.com>`, Python reads the first address, and mail programs the second.
        raise InvalidEmail(FIELD, "has senders that mail programs read differently; put an address in a name in quotes")
    return found
