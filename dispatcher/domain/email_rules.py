"""The rules for each field of an email. Each function returns the value to keep, or raises `InvalidEmail`.

The parameter `field` is the name of an argument of `Email`, or of its invalid part, such as `to[1]`. The rules also
check types, because callers may not use a type checker.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from dispatcher.domain.address import parse_address
from dispatcher.domain.calendar import Calendar
from dispatcher.domain.headers import header_name_fault, header_value_fault
from dispatcher.domain.lanes import LANE
from dispatcher.domain.outgoing import CONTENT_ID_PATTERN, Attachment
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.text import (
    MAX_KEY_CHARACTERS,
    MAX_METADATA_CHARACTERS,
    MAX_TENANT_CHARACTERS,
    METADATA_KEY_PATTERN,
    TENANT_PATTERN,
    body_fault,
    header_fault,
    shown,
)
from dispatcher.errors import InvalidEmail

MAX_RECIPIENTS: Final = 1000
"""The most recipients in to, cc and bcc together, and the most addresses in reply_to. This is SendGrid's limit per
request. SMTP servers must accept 100 (RFC 5321)."""
MAX_LINE_CHARACTERS: Final = 998
"""The longest subject or header value: the longest line before folding (RFC 5322, section 2.1.1)."""
MAX_BODY_OCTETS: Final = 10 * 1024 * 1024
"""The most octets of text and HTML together. Far more than any readable email has. Bounds a worker's memory per
email."""
MAX_HEADERS: Final = 100
"""The most additional headers; no mail program writes so many. Mail servers limit the header section, some to 64 KiB.
"""
MAX_HEADER_NAME_CHARACTERS: Final = 76
"""A header name must fit on its line before the first fold (RFC 2047, section 2)."""
MAX_ATTACHMENTS: Final = 100
"""The most attachments of an email. Bounds the rows per email."""
MAX_ATTACHMENT_OCTETS: Final = 25 * 1024 * 1024
"""The most octets of all attachments of an email together, decoded. In base64, this is 36 MB. SES accepts 40 MB;
SendGrid and many servers accept less."""
MAX_TAGS: Final = 10
"""SendGrid's limit for categories."""
MAX_TAG_CHARACTERS: Final = 100
"""Below SendGrid's limit of 255, and long enough for a readable name."""
MAX_METADATA: Final = 20
"""The most keys of metadata. Lists, the feed and webhooks repeat the metadata of an email, so it is small."""
MAX_DAYS_AHEAD: Final = 366
"""How far ahead send_at and expires_at may be. A later time is usually a mistake, such as milliseconds instead of
seconds."""

NO_HEADERS: Final = MappingProxyType[str, str]({})
NO_METADATA: Final = MappingProxyType[str, str]({})
_MAX_CACHED_CHARACTERS: Final = 200
_TEMPLATE: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CID: Final = re.compile(rf"""\bcid:({CONTENT_ID_PATTERN})""", re.IGNORECASE)
_SEVERAL: Final = re.compile(r"[^@,;]{1,500}@[^@,;]{1,500}[,;][^@]{1,500}@")


def string(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidEmail(field, "must be a string")
    # Convert subclasses, such as StrEnum or a template engine's safe string: drivers and encoders accept only str.
    return value if type(value) is str else str.__str__(value)


def line(field: str, value: object) -> str:
    """A text that is allowed in a header."""
    text = string(field, value)
    if len(text) > MAX_LINE_CHARACTERS:
        raise InvalidEmail(field, f"is longer than {MAX_LINE_CHARACTERS} characters")
    if fault := header_fault(text):
        raise InvalidEmail(field, fault)
    return text


def key(field: str, value: object, longest: int = MAX_KEY_CHARACTERS) -> str:
    """A message key, a tag or another printable name. Names are compared character by character, without Unicode
    normalization."""
    text = string(field, value)
    if not 1 <= len(text) <= longest:
        raise InvalidEmail(field, f"must be 1 to {longest} characters long")
    if not text.isprintable():
        raise InvalidEmail(field, "contains an unprintable character")
    if text != text.strip():
        # HTTP removes spaces at both ends of a header's value, so two different keys would become the same key.
        raise InvalidEmail(field, "starts or ends with a space; remove it")
    return text


def tenant(value: object) -> str:
    return tenant_id("tenant_id", value)


def tenant_id(field: str, value: object) -> str:
    text = string(field, value)
    if not 1 <= len(text) <= MAX_TENANT_CHARACTERS:
        raise InvalidEmail(field, f"must be 1 to {MAX_TENANT_CHARACTERS} characters long")
    if not re.fullmatch(TENANT_PATTERN, text):
        raise InvalidEmail(field, "must begin with an ASCII letter or digit; letters, digits and . _ : - may follow")
    return text


def policy(field: str, value: object) -> OnUncertain:
    try:
        return OnUncertain(string(field, value))
    except ValueError:
        raise InvalidEmail(field, f"must be one of: {', '.join(OnUncertain)}") from None


def instant(field: str, value: object) -> datetime:
    """A point in time, converted to UTC. The value must have a zone, because hosts may have different zones.

    The instant may be in the past: an application may repeat a call that it first made before the instant. Warns if the
    zone skips this time when its clocks are set forward.
    """
    if not isinstance(value, datetime):
        raise InvalidEmail(field, "must be a datetime")
    if value.utcoffset() is None:
        raise InvalidEmail(field, "has no time zone; set tzinfo, for example datetime.now(UTC) + timedelta(hours=1)")
    if value - datetime.now(UTC) > timedelta(days=MAX_DAYS_AHEAD):
        raise InvalidEmail(field, f"is more than {MAX_DAYS_AHEAD} days ahead")
    before, after = (value.replace(fold=fold).utcoffset() or timedelta() for fold in (0, 1))
    if before < after:  # only for a time that the zone skips (PEP 495)
        zone, taken = value.tzinfo, value + (after - before if value.fold == 0 else before - after)
        message = f"{field}: {value:%Y-%m-%d %H:%M} does not exist in {zone}; {taken:%H:%M} is used instead."
        warnings.warn(message, stacklevel=4)  # 4: where the application creates the email
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidEmail(field, "is before the year 1 in UTC") from None


def lane(field: str, value: object) -> str:
    """The name of a lane. Does not check that the lane exists, because only the settings of the sending hosts list the
    lanes."""
    text = string(field, value)
    if not LANE.fullmatch(text):
        raise InvalidEmail(field, "must be the name of a lane, such as urgent: lower-case letters, digits and _")
    return text


def flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidEmail(field, "must be true or false")
    return value


def address(field: str, value: object) -> str:
    text = string(field, value)
    try:
        parse_address(text)
    except ValueError as error:
        raise InvalidEmail(field, str(error)) from None
    return text


def sender(field: str, value: object) -> str:
    """The sender's address, unchanged. Results are cached, because most emails have one of a few senders."""
    if type(value) is str and len(value) <= _MAX_CACHED_CHARACTERS:
        return _sender(value)
    return address(field, value)


@lru_cache(maxsize=1024)
def _sender(text: str) -> str:
    return address("sender", text)


def addresses(field: str, value: object) -> tuple[str, ...]:
    """The addresses in a list, or the single address in a string. Checks each address."""
    if isinstance(value, str):
        return (_recipient(field, value),)
    listed = _sequence(field, value, MAX_RECIPIENTS)
    return tuple([_recipient(f"{field}[{index}]", item) for index, item in enumerate(listed)])


def _recipient(field: str, value: object) -> str:
    try:
        return address(field, value)
    except InvalidEmail:
        if isinstance(value, str) and _SEVERAL.match(value):
            raise InvalidEmail(field, "has several addresses in one string; give a list of addresses") from None
        raise


def template(field: str, value: object) -> str:
    """The id of a provider's template: `d-…` for SendGrid, the template's name for SES."""
    text = string(field, value)
    if not _TEMPLATE.fullmatch(text):
        raise InvalidEmail(field, "must be 1 to 100 characters: ASCII letters, digits, - and _")
    return text


def body(field: str, value: object) -> str | None:
    text = string(field, value)
    if len(text) > MAX_BODY_OCTETS:
        raise _oversized_body(field)
    if fault := body_fault(text):
        raise InvalidEmail(field, fault)
    return text or None


def check_bodies(text: str | None, html: str | None) -> None:
    """Raises InvalidEmail if both bodies are empty, or too large together."""
    if text is None and html is None:
        raise InvalidEmail("text", "is required, and must not be empty, unless html is set")
    text, html = text or "", html or ""
    if 4 * (len(text) + len(html)) <= MAX_BODY_OCTETS:
        return
    text_octets, html_octets = len(text.encode()), len(html.encode())
    if text_octets + html_octets > MAX_BODY_OCTETS:
        raise _oversized_body("html" if text_octets <= html_octets else "text")


def _oversized_body(field: str) -> InvalidEmail:
    return InvalidEmail(field, f"is too large; text and html together may have {MAX_BODY_OCTETS} bytes")


def headers(value: object, allowed: Collection[str]) -> Mapping[str, str]:
    """Additional headers in their order, read-only. `allowed` has the names of the headers that are allowed although
    they control a provider."""
    if value is NO_HEADERS:
        return NO_HEADERS
    if not isinstance(value, Mapping):
        raise InvalidEmail("headers", "must be an object whose values are strings")
    if len(value) > MAX_HEADERS:
        raise InvalidEmail("headers", f"has more than {MAX_HEADERS} headers")
    kept: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in value.items():
        field = f"headers.{shown(name)}"
        if not isinstance(name, str) or not _TOKEN.fullmatch(name) or len(name) > MAX_HEADER_NAME_CHARACTERS:
            reason = f"is not a header name; use 1 to {MAX_HEADER_NAME_CHARACTERS} letters, digits and hyphens"
            raise InvalidEmail(field, reason)
        if fault := header_name_fault(name, allowed):
            raise InvalidEmail(field, fault)
        if (lowered := name.lower()) in seen:
            raise InvalidEmail(field, "is set twice; upper and lower case make no difference in header names")
        seen.add(lowered)
        value = kept[string(field, name)] = line(field, text)
        if fault := header_value_fault(lowered, value):
            raise InvalidEmail(field, fault)
    return MappingProxyType(kept)


def attachments(field: str, value: object) -> tuple[Attachment, ...]:
    """The attachments. If they are too large together, the error names the first attachment beyond the limit."""
    listed = _sequence(field, value, MAX_ATTACHMENTS)
    kept: list[Attachment] = []
    octets = 0
    for index, item in enumerate(listed):
        if not isinstance(item, Attachment):
            raise InvalidEmail(f"{field}[{index}]", "must be an Attachment")
        octets += len(item.content)
        if octets > MAX_ATTACHMENT_OCTETS:
            reason = f"is too large; all attachments together may have {MAX_ATTACHMENT_OCTETS} bytes"
            raise InvalidEmail(f"{field}[{index}].content", reason)
        kept.append(item)
    return tuple(kept)


def check_content_ids(files: Sequence[Attachment], html: str | None, template_id: str | None) -> None:
    """Raises InvalidEmail if the HTML and the content ids of inline images do not match. A template's is unknown."""
    ids = [(index, file.content_id) for index, file in enumerate(files) if file.content_id is not None]
    if not ids:
        return
    seen: set[str] = set()
    shown_ids = set(_CID.findall(html or ""))
    for index, content_id in ids:
        field = f"attachments[{index}].content_id"
        if content_id in seen:
            raise InvalidEmail(field, "is also that of another attachment; give each its own")
        seen.add(content_id)
        if template_id is None and content_id not in shown_ids:
            raise InvalidEmail(field, f'is not shown by html; write <img src="cid:{content_id}">, or remove content_id')
    if unknown := shown_ids - seen:
        raise InvalidEmail("html", f"shows cid:{shown(min(unknown))}, but no attachment has this content_id")


def calendar(field: str, value: object) -> Calendar:
    if not isinstance(value, Calendar):
        raise InvalidEmail(field, "must be a Calendar")
    return value


def octets(field: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidEmail(field, "must be bytes")
    return value


def tags(field: str, value: object) -> tuple[str, ...]:
    """The tags in a list without duplicates, or the single tag in a string."""
    listed = [value] if isinstance(value, str) else _sequence(field, value, MAX_TAGS)
    kept = tuple([key(f"{field}[{index}]", item, MAX_TAG_CHARACTERS) for index, item in enumerate(listed)])
    if len(set(kept)) != len(kept):
        raise InvalidEmail(field, "contains the same tag twice")
    return kept


def metadata(field: str, value: object) -> Mapping[str, str]:
    """Keys and their values, read-only. A key has no `=`, so a filter can write a pair as `order=4711`."""
    if not isinstance(value, Mapping):
        raise InvalidEmail(field, "must be an object whose values are strings")
    if len(value) > MAX_METADATA:
        raise InvalidEmail(field, f"has more than {MAX_METADATA} keys")
    kept: dict[str, str] = {}
    for name, text in value.items():
        within = f"{field}.{shown(name)}"
        if not isinstance(name, str) or not re.fullmatch(METADATA_KEY_PATTERN, name):
            raise InvalidEmail(within, "is not a key of metadata; use 1 to 64 ASCII letters, digits and _ . -")
        kept[string(within, name)] = key(within, text, MAX_METADATA_CHARACTERS)
    return MappingProxyType(kept)


def _sequence(field: str, value: object, most: int) -> Sequence[object]:
    # Check for list and tuple first: isinstance with the abstract Sequence is slower.
    if not isinstance(value, (list, tuple)) and (
        not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray))
    ):
        raise InvalidEmail(field, "must be a list")
    if len(value) > most:
        raise InvalidEmail(field, f"has more than {most} entries")
    return value
