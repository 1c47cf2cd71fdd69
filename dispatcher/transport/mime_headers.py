"""Header fields, encoded and folded by the standard library's `Header`, and what may not stand in one.

The check is ours on purpose: the library has a history of header injections, and Python 3.11 before .15 lets some
through. So is the form of a mailbox: `email.utils.formataddr` refuses a local part in UTF-8 (RFC 6532), and folds
nothing.
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
from dispatcher.domain.header_names import is_written_by_others
from dispatcher.domain.outcome import Reason
from dispatcher.domain.text import header_fault
from dispatcher.errors import DispatcherError

LINE_CHARACTERS: Final = 76
"""Where we fold: what RFC 2047, section 2, allows a line with an encoded word; RFC 5322 asks for 78."""
MAX_WORD_CHARACTERS: Final = 900
"""A longer run without a space cannot be folded below the 998 octets of RFC 5322 and becomes encoded words."""
_UTF_8: Final = Charset("utf-8")
# Left alone, it measures every character for the shorter of two encodings: 998 of them take 2 ms, five times as long.
_UTF_8.header_encoding = BASE64
_FOLD: Final = ",\r\n "
_ATOMS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?: [A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_WORD: Final = r"[A-Za-z0-9!#$%&'*+.^_`{|}~-]{1,127}"
_CONTENT_TYPE: Final = re.compile(rf"{_WORD}/{_WORD}")
_FIELD_NAME: Final = re.compile(r"[!-9;-~]{1,76}")


class UnrenderableEmail(DispatcherError):
    """An email cannot be put into MIME; enqueue should have refused it.

    Attributes:
        reason: What an adapter rejects it with.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked(field: str, text: str) -> str:
    """The text, if it can stand in a header.

    Raises:
        UnrenderableEmail: it holds a control character, or what a receiver would decode to one.
    """
    if fault := header_fault(text):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"{field} {fault}")
    return text


def text_field(name: str, text: str) -> str:
    """An unstructured field such as Subject, folded, with its line end."""
    if not _FIELD_NAME.fullmatch(name):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "headers holds a name that is no header's name")
    if not _stands_as_it_is(checked(f"header {name}", text)):
        text = _folded(name, text, _UTF_8)
    elif len(name) + 2 + len(text) > LINE_CHARACTERS:
        text = _folded(name, text, None)
    return f"{name}: {text}\r\n"


def settable(name: str) -> str:
    """Returns the name of an email's own header; raises UnrenderableEmail if an email may not set it."""
    if is_written_by_others(name):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"headers holds {name}, which an email may not set itself")
    return name


def checked_type(content_type: str) -> str:
    """An attachment's content type, if it is one; raises UnrenderableEmail as `checked` does."""
    if not _CONTENT_TYPE.fullmatch(checked("an attachment's content_type", content_type)):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "an attachment's content_type is not a MIME type")
    return content_type


def addresses(field: str, texts: Iterable[str], reason: Reason) -> list[Address]:
    """A field's addresses; raises UnrenderableEmail with the reason if one cannot stand in a header."""
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
    """A field of mailboxes such as To, one per line; a local part that is not ASCII stands as it is."""
    return f"{name}: {_FOLD.join(map(mailbox, addresses))}\r\n"


def mailbox(address: Address) -> str:
    """`Name <local@domain>` for a header: the name quoted or encoded where needed, the domain in ASCII."""
    spec = ascii_spec(address)
    name = checked("a name in an address", address.display_name)
    if not name:
        return spec
    if name.isascii() and len(name) <= LINE_CHARACTERS and "=?" not in name:
        return f"{name if _ATOMS.fullmatch(name) else quoted(name)} <{spec}>"
    # Room for the longest field's name: this may come to stand after it.
    return f"{_folded('Reply-To', name, _UTF_8)}\r\n <{spec}>"


def ascii_spec(address: Address) -> str:
    """`local@domain` with the domain as DNS has it.

    Raises:
        ValueError: the domain has no such form.
    """
    return f"{address.local}@{ascii_domain(address.domain)}"


@lru_cache(maxsize=4096)
def ascii_domain(domain: str) -> str:
    """A domain as DNS has it: IDNA 2008 with the mappings of UTS 46 where it is not ASCII.

    Raises:
        ValueError: IDNA has no form for it (`idna.IDNAError` is one); says nothing of the domain.
    """
    if domain.isascii():
        return domain
    try:
        return idna.encode(domain, uts46=True).decode("ascii")
    except idna.IDNAError:
        raise ValueError("has a domain that IDNA does not allow") from None


def quoted(text: str) -> str:
    """A quoted-string (RFC 5322, section 3.2.4)."""
    return f'"{quote(text)}"'


def _stands_as_it_is(text: str) -> bool:
    """Whether folding and unfolding give the text back, and nobody takes it for something encoded."""
    fits = len(text) <= MAX_WORD_CHARACTERS or max(map(len, text.split(" "))) <= MAX_WORD_CHARACTERS
    return fits and text.isascii() and text == text.strip(" ") and "=?" not in text


def _folded(name: str, text: str, charset: Charset | None) -> str:
    return Header(text, charset, LINE_CHARACTERS, name).encode(linesep="\r\n")
