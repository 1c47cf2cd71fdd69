"""Header fields, folded, with the encoded words of the standard library's `Header`; and the check for unsafe values.

Our own code checks for header injection, because the library's checks had several gaps, and Python 3.11 before 3.11.15
still has some. Our own code also formats mailboxes, because `email.utils.formataddr` rejects a local part in UTF-8 (RFC
6532), and does not fold long lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from email.charset import BASE64, Charset
from email.header import Header
from email.utils import quote
from functools import lru_cache
from typing import Final

import idna

from dispatcher.domain.address import Address, parse_address
from dispatcher.domain.headers import HEADER_KINDS, MAX_WORD_CHARACTERS, is_reserved, named_parts
from dispatcher.domain.outcome import Reason
from dispatcher.domain.text import header_fault
from dispatcher.errors import DispatcherError

LINE_CHARACTERS: Final = 76
"""Longer lines are folded between words. This is the limit for a line with an encoded word (RFC 2047, section 2). RFC
5322 recommends at most 78 for other lines. A longer word makes a longer line."""
_NAME_CHARACTERS: Final = 40
_UTF_8: Final = Charset("utf-8")
# Without this setting, the library compares two encodings for every character. A header of 998 characters then takes 2
# ms, five times as long as with this setting.
_UTF_8.header_encoding = BASE64
FOLD: Final = "\r\n "
_WORDS: Final = re.compile(" *[^ ]+")
"""Matches a word with the spaces before it."""
_ATOMS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?: [A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_WORD: Final = r"[A-Za-z0-9!#$%&'*+.^_`{|}~-]{1,127}"
_CONTENT_TYPE: Final = re.compile(rf"{_WORD}/{_WORD}")
_FIELD_NAME: Final = re.compile(r"[!-9;-~]{1,76}")


class UnrenderableEmail(DispatcherError):
    """An email cannot be rendered, as MIME or for a provider's API. `reason` is that of the rejection."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked_text(field: str, text: str) -> str:
    """Returns the text if a header may contain it. An encoded word (RFC 2047) could hide a control character."""
    if fault := header_fault(text):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"{field} {fault}")
    return text


def text_field(name: str, text: str) -> str:
    """A header field with free text, such as Subject: encoded if necessary, folded, with its line end."""
    checked_text(f"header {name}", text)
    # The text stays unencoded if folding keeps it, and it does not look encoded.
    fits = len(text) <= MAX_WORD_CHARACTERS or max(map(len, _WORDS.findall(text))) <= MAX_WORD_CHARACTERS
    if not (fits and text.isascii() and text == text.strip(" ") and "=?" not in text):
        return f"{name}: {encoded_words(name, text)}\r\n"
    return f"{name}: {text}\r\n" if len(name) + 2 + len(text) <= LINE_CHARACTERS else _folded_words(name, text)


def header_field(name: str, value: str) -> str:
    """The field of a header that an application sets: encoded as mail software reads it, folded, with its line end."""
    words = None
    if not _FIELD_NAME.fullmatch(name):
        words = "an invalid name: use 1 to 76 printable ASCII characters, no colon"
    elif is_reserved(name):
        words = f"{name}, which the dispatcher or mail servers set; remove it"
    if words:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"headers contains {words}")
    if (kind := HEADER_KINDS.get(name.lower())) is None:
        return text_field(name, value)
    try:
        parts = named_parts(kind, checked_text(f"header {name}", value))
    except ValueError as error:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"header {name} {error}") from None
    return _folded_words(name, ", ".join(_named(*part) if part[0] else part[1] for part in parts).replace(FOLD, " "))


def header_value(name: str, value: str) -> str:
    """The value of a header as `header_field` writes it, on one line, for a provider that folds the line itself."""
    return header_field(name, value)[len(name) + 2 : -2].replace(FOLD, " ")


def checked_type(content_type: str) -> str:
    """Returns an attachment's content type if it is valid; raises UnrenderableEmail if not."""
    if not _CONTENT_TYPE.fullmatch(checked_text("an attachment's content_type", content_type)):
        words = "an attachment's content_type is not a MIME type such as application/pdf"
        raise UnrenderableEmail(Reason.INVALID_CONTENT, words)
    return content_type


def type_in_base64(content_type: str) -> str:
    """The type of an attachment that is sent as Base64; raises UnrenderableEmail as `checked_type` does."""
    # RFC 2046, sections 5.1 and 5.2.1, forbids Base64 for message/* and multipart/*.
    is_composite = checked_type(content_type).lower().startswith(("message/", "multipart/"))
    return "application/octet-stream" if is_composite else content_type


def addresses(field: str, texts: Iterable[str], reason: Reason) -> list[Address]:
    """Parses a field's addresses. Raises UnrenderableEmail with the given reason if a header cannot contain one."""
    found = []
    for text in texts:
        try:
            address = parse_address(text)
            ascii_domain(address.domain)
        except ValueError as error:
            raise UnrenderableEmail(reason, f"{field} {error}") from None
        found.append(address)
    return found


def address_field(name: str, addresses: Iterable[Address]) -> str:
    """A header field such as To, with one mailbox per line. A local part that is not ASCII is written as UTF-8."""
    return f"{name}: {f',{FOLD}'.join(map(mailbox, addresses))}\r\n"


def mailbox(address: Address) -> str:
    """`Name <local@domain>` for a header: the name quoted or encoded if necessary, the domain in ASCII."""
    spec = ascii_spec(address)
    name = checked_text("a name in an address", address.display_name)
    return _named(name, f"<{spec}>") if name else spec


def _named(name: str, text: str) -> str:
    if name.isascii() and len(name) <= LINE_CHARACTERS and "=?" not in name:
        return f"{name if _ATOMS.fullmatch(name) else quoted(name)} {text}"
    # Fold the name as if it followed `Reply-To`, the longest field name, because any field may contain this mailbox.
    return f"{encoded_words('Reply-To', name)}{FOLD}{text}"


def ascii_spec(address: Address) -> str:
    """`local@domain` with the domain in ASCII. Raises ValueError if the domain has no ASCII form."""
    return f"{address.local}@{ascii_domain(address.domain)}"


@lru_cache(maxsize=4096)
def ascii_domain(domain: str) -> str:
    """The domain by IDNA 2008 and UTS 46. Raises ValueError, without the domain, if IDNA does not allow it."""
    if domain.isascii():
        return domain
    try:
        return idna.encode(domain, uts46=True).decode("ascii")
    except idna.IDNAError:
        raise ValueError("has a domain that IDNA does not allow") from None


def quoted(text: str) -> str:
    """The text in double quotes, with escapes if necessary: a quoted-string of RFC 5322, section 3.2.4."""
    return f'"{quote(text)}"'


def encoded_words(name: str, text: str) -> str:
    """The text as encoded words (RFC 2047), folded as the value of the field with this name."""
    # Only a part of a long name counts, so that the first encoded word follows the name on its line.
    return Header(text, _UTF_8, LINE_CHARACTERS, name[:_NAME_CHARACTERS]).encode(linesep="\r\n")


def _folded_words(name: str, text: str) -> str:
    """The field, folded between words. The first follows the name: some software ignores an empty first line."""
    first, *words = _WORDS.findall(text) or [""]
    lines = [f"{name}: {first}"]
    for word in words:
        if len(lines[-1]) + len(word) > LINE_CHARACTERS:
            lines.append(word)
        else:
            lines[-1] += word
    return "\r\n".join(lines) + "\r\n"
