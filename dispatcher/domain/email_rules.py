"""What an email may hold, field by field: each function gives the value that is kept, or raises `InvalidEmail`.

`field` is the name of `Email`'s argument. JSON has the same name, except `from` for `sender`. The rules check types,
too, since a caller may not use a type checker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeGuard

from dispatcher.domain.address import parse_address
from dispatcher.domain.header_names import header_name_fault
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.domain.outgoing import Attachment
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.text import body_fault, header_fault
from dispatcher.errors import InvalidEmail

MAX_TENANT_CHARACTERS: Final = 100
"""A name in every log line and index entry."""
MAX_RECIPIENTS: Final = 1000
"""Over to, cc and bcc; and in reply_to: SendGrid's limits for one request. SMTP servers must take 100 (RFC 5321)."""
MAX_LINE_CHARACTERS: Final = 998
"""Subject and header values: RFC 5322, section 2.1.1, the longest line before folding."""
MAX_BODY_OCTETS: Final = 10 * 1024 * 1024
"""Text and HTML together: far above any readable email; bounds a worker's memory per email."""
MAX_HEADERS: Final = 100
"""More than any mail program writes; mail servers bound the header section, some at 64 KiB."""
MAX_HEADER_NAME_CHARACTERS: Final = 76
"""A name must fit on its line before the first fold (RFC 2047, section 2)."""
MAX_ATTACHMENTS: Final = 100
"""More than a reader opens; bounds the rows per email."""
MAX_ATTACHMENT_OCTETS: Final = 25 * 1024 * 1024
"""Over all attachments, decoded; base64 makes 36 MB of it, and SES takes 40 MB. SendGrid and many servers take less."""
MAX_TAGS: Final = 10
"""SendGrid's limit of categories."""
MAX_TAG_CHARACTERS: Final = 100
"""Below SendGrid's 255, and enough for a name that people read."""

_MAX_CACHED_CHARACTERS: Final = 200
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_TEMPLATE: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SEVERAL: Final = re.compile(r"[^@,;]{1,500}@[^@,;]{1,500}[,;][^@]{1,500}@")


def line(field: str, value: object, longest: int, fault_of: Callable[[str], str | None] = header_fault) -> str:
    """A text that may stand in a header."""
    text = _text(field, value)
    if len(text) > longest:
        raise InvalidEmail(field, f"has more than {longest} characters")
    if fault := fault_of(text):
        raise InvalidEmail(field, fault)
    return text


def key(field: str, value: object, longest: int = MAX_KEY_CHARACTERS) -> str:
    """A name that people and logs print; compared character by character, so normalise it before you make it."""
    text = _text(field, value)
    if not 1 <= len(text) <= longest:
        raise InvalidEmail(field, f"must have 1 to {longest} characters")
    if not text.isprintable():
        raise InvalidEmail(field, "contains a character that does not print")
    if text != text.strip():
        # HTTP drops it on the way: the same key would be one email there and another here.
        raise InvalidEmail(field, "begins or ends with a space")
    return text


def tenant(value: object) -> str:
    """A tenant's id."""
    text = _text("tenant_id", value)
    if not 1 <= len(text) <= MAX_TENANT_CHARACTERS:
        raise InvalidEmail("tenant_id", f"must have 1 to {MAX_TENANT_CHARACTERS} characters")
    if not _TENANT.fullmatch(text):
        raise InvalidEmail("tenant_id", "may hold ASCII letters, digits and . _ : - and begins with a letter or digit")
    return text


def policy(value: object) -> OnUncertain | None:
    """The email's own policy, from its name or as it is; None for the host's."""
    if value is None:
        return None
    try:
        return OnUncertain(_text("on_uncertain", value))
    except ValueError:
        raise InvalidEmail("on_uncertain", f"must be one of: {', '.join(OnUncertain)}") from None


def flag(field: str, value: object) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        raise InvalidEmail(field, "must be true or false")
    return value


def address(field: str, value: object) -> str:
    """One address, as given."""
    text = _text(field, value)
    try:
        parse_address(text)
    except ValueError as error:
        raise InvalidEmail(field, str(error)) from None
    return text


def sender(value: object) -> str:
    """The address that an email comes from, as given. Most emails come from few, so these are not parsed each time."""
    if type(value) is str and len(value) <= _MAX_CACHED_CHARACTERS:
        return _sender(value)
    return address("sender", value)


@lru_cache(maxsize=1024)
def _sender(text: str) -> str:
    return address("sender", text)


def addresses(field: str, value: object) -> tuple[str, ...]:
    """Addresses, from one text or a list of them."""
    if isinstance(value, str):
        return (_recipient(field, value),)
    listed = _sequence(field, value, MAX_RECIPIENTS)
    return tuple([_recipient(f"{field}[{index}]", item) for index, item in enumerate(listed)])


def _recipient(field: str, value: object) -> str:
    try:
        return address(field, value)
    except InvalidEmail:
        if isinstance(value, str) and _SEVERAL.match(value):
            raise InvalidEmail(field, "has several addresses in one text; give a list of single addresses") from None
        raise


def template(value: object) -> str:
    """The id of a provider's template: SendGrid's `d-…`, SES's template name."""
    text = _text("template_id", value)
    if not _TEMPLATE.fullmatch(text):
        raise InvalidEmail("template_id", "must be 1 to 100 ASCII letters, digits, - and _")
    return text


def bodies(text: object, html: object, *, required: bool = True) -> tuple[str | None, str | None]:
    """Text and HTML; an empty one counts as absent, and one of them must be there if a body is required."""
    kept_text, text_octets = _body("text", text)
    kept_html, html_octets = _body("html", html)
    if required and kept_text is None and kept_html is None:
        raise InvalidEmail("text", "is missing, and so is html; an email needs one of them, not empty")
    if text_octets + html_octets > MAX_BODY_OCTETS:
        raise _oversized_body("html" if text_octets <= html_octets else "text")
    return kept_text, kept_html


def _body(field: str, value: object) -> tuple[str | None, int]:
    if value is None:
        return None, 0
    text = _text(field, value)
    if len(text) > MAX_BODY_OCTETS:
        raise _oversized_body(field)
    if fault := body_fault(text):
        raise InvalidEmail(field, fault)
    return text or None, len(text) if text.isascii() else len(text.encode())


def _oversized_body(field: str) -> InvalidEmail:
    return InvalidEmail(field, f"makes text and html exceed {MAX_BODY_OCTETS} octets together")


def headers(value: object, allowed: Collection[str]) -> Mapping[str, str]:
    """Additional headers, in their order; the mapping is read-only.

    Args:
        allowed: Headers that command a provider and are allowed nevertheless.
    """
    if not isinstance(value, Mapping):
        raise InvalidEmail("headers", "must be an object of names and texts")
    if len(value) > MAX_HEADERS:
        raise InvalidEmail("headers", f"has more than {MAX_HEADERS} entries")
    kept: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in value.items():
        field = f"headers.{shown(name)}"
        lowered = _header_name(field, name, allowed)
        if lowered in seen:
            raise InvalidEmail(field, "is given twice (case does not matter)")
        seen.add(lowered)
        kept[_text(field, name)] = line(field, text, MAX_LINE_CHARACTERS)
    return MappingProxyType(kept)


def _header_name(field: str, name: object, allowed: Collection[str]) -> str:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name) or len(name) > MAX_HEADER_NAME_CHARACTERS:
        raise InvalidEmail(field, f"is not a header's name: 1 to {MAX_HEADER_NAME_CHARACTERS} characters of a token")
    if fault := header_name_fault(name, allowed):
        raise InvalidEmail(field, fault)
    return name.lower()


def attachments(value: object) -> tuple[Attachment, ...]:
    """Attachments; the first one that makes them too large together is named."""
    listed = _sequence("attachments", value, MAX_ATTACHMENTS)
    kept: list[Attachment] = []
    octets = 0
    for index, item in enumerate(listed):
        field = f"attachments[{index}]"
        if not isinstance(item, Attachment):
            raise InvalidEmail(field, "must be an Attachment")
        octets += len(item.content)
        if octets > MAX_ATTACHMENT_OCTETS:
            raise InvalidEmail(f"{field}.content", f"makes attachments exceed {MAX_ATTACHMENT_OCTETS} octets together")
        kept.append(item)
    return tuple(kept)


def tags(value: object) -> tuple[str, ...]:
    """Tags, each once; one text counts as one tag."""
    listed = [value] if isinstance(value, str) else _sequence("tags", value, MAX_TAGS)
    kept = tuple([key(f"tags[{index}]", item, MAX_TAG_CHARACTERS) for index, item in enumerate(listed)])
    if len(set(kept)) != len(kept):
        raise InvalidEmail("tags", "has one tag twice")
    return kept


def shown(name: object) -> str:
    """A field's or header's name as an error may show it: bounded, and only what prints."""
    text = name if isinstance(name, str) else type(name).__name__
    printable = "".join(character if character.isprintable() else "?" for character in text[:41])
    return printable if len(text) <= 40 else f"{printable[:40]}…"


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidEmail(field, "must be a text")
    # A subclass (StrEnum, a template engine's safe string) becomes a plain str: drivers and encoders know only that.
    return value if type(value) is str else str.__str__(value)


def _sequence(field: str, value: object, most: int) -> Sequence[object]:
    # The two that come first, because asking what a Sequence is takes longer than the rest of an empty list.
    if not isinstance(value, (list, tuple)) and not _is_other_sequence(value):
        raise InvalidEmail(field, "must be a list")
    if len(value) > most:
        raise InvalidEmail(field, f"has more than {most} entries")
    return value


def _is_other_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
