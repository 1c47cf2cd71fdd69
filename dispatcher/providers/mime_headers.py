"""Header fields: RFC 5322 lines of ASCII with folding, RFC 2047 encoded words and RFC 2231 parameters where needed.

The standard library's `email` package does this too, at 20 to 60 µs per field, and with a history of header injections;
ours refuses what it does not know and costs one. The tests read every field back with the standard library's parser.
"""

from __future__ import annotations

import re
from binascii import b2a_base64
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final
from urllib.parse import quote

import idna

from dispatcher.domain.address import Address
from dispatcher.domain.outcome import Reason
from dispatcher.domain.text import header_fault
from dispatcher.errors import DispatcherError

LINE_CHARACTERS: Final = 76
"""Where we fold; RFC 5322, section 2.1.1, asks for 78 without the line end."""
MAX_WORD_CHARACTERS: Final = 900
"""A longer run without a space cannot be folded below the 998 octets of RFC 5322 and becomes encoded words."""
_ENCODED_WORD_OCTETS: Final = 39
"""Of text in an encoded word: 52 of Base64, 64 with its frame. RFC 2047, section 2, allows 75, and 76 for the line, on
which the field's name stands too."""
_PARAMETER_CHARACTERS: Final = 60

_ATOMS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?: [A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_FIELD_NAME: Final = re.compile(r"[!-9;-~]{1,76}")
_QUOTABLE: Final = re.compile(r'(["\\])')
_LOOKS_ENCODED: Final = re.compile(r"=\?")


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
    checked(f"header {name}", text)
    if not _stands_as_it_is(text):
        return f"{name}: {_encoded_words(text)}\r\n"
    if len(name) + 2 + len(text) <= LINE_CHARACTERS:
        return f"{name}: {text}\r\n"
    return _folded(f"{name}: ", text.split(" "), " ")


def address_field(name: str, addresses: Iterable[Address]) -> str:
    """A field of mailboxes such as To, folded, with its line end; a local part that is not ASCII stands as it is."""
    return _folded(f"{name}: ", [mailbox(address) for address in addresses], ", ")


def mailbox(address: Address) -> str:
    """`Name <local@domain>` for a header: the name quoted or encoded where needed, the domain in ASCII."""
    spec = ascii_spec(address)
    name = address.display_name
    if not name:
        return spec
    checked("a name in an address", name)
    if not name.isascii() or len(name) > LINE_CHARACTERS or _LOOKS_ENCODED.search(name):
        return f"{_encoded_words(name)}\r\n <{spec}>"
    if _ATOMS.fullmatch(name):
        return f"{name} <{spec}>"
    return f"{quoted(name)} <{spec}>"


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


def parameter(name: str, value: str) -> str:
    """`; name="value"` on a line of its own; RFC 2231 continuations where it is long or not ASCII."""
    if value.isascii() and len(value) <= _PARAMETER_CHARACTERS and "=?" not in value:
        return f";\r\n {name}={quoted(value)}"
    chunks = list(_chunks(quote(value, safe=""), _PARAMETER_CHARACTERS))
    if len(chunks) == 1:
        return f";\r\n {name}*=utf-8''{chunks[0]}"
    sections = [f";\r\n {name}*{number}*={chunk}" for number, chunk in enumerate(chunks)]
    sections[0] = sections[0].replace("=", "=utf-8''", 1)
    return "".join(sections)


def quoted(text: str) -> str:
    """A quoted-string (RFC 5322, section 3.2.4)."""
    return '"' + _QUOTABLE.sub(r"\\\1", text) + '"'


def _stands_as_it_is(text: str) -> bool:
    """Whether folding and unfolding give the text back, and nobody takes it for something encoded."""
    if not text.isascii() or text != text.strip(" "):
        return False
    if len(text) <= LINE_CHARACTERS:
        return "=?" not in text or not _LOOKS_ENCODED.search(text)
    return "  " not in text and max(map(len, text.split(" "))) <= MAX_WORD_CHARACTERS


def _encoded_words(text: str) -> str:
    words = (b2a_base64(chunk, newline=False).decode("ascii") for chunk in _octet_chunks(text))
    return "\r\n ".join(f"=?utf-8?b?{word}?=" for word in words)


def _octet_chunks(text: str) -> Iterator[bytes]:
    """The text's UTF-8 in runs that fit an encoded word; no character is split (RFC 2047, section 5)."""
    octets = text.encode()
    start = 0
    while len(octets) - start > _ENCODED_WORD_OCTETS:
        end = start + _ENCODED_WORD_OCTETS
        while octets[end] & 0xC0 == 0x80:
            end -= 1
        yield octets[start:end]
        start = end
    yield octets[start:]


def _chunks(escaped: str, size: int) -> Iterator[str]:
    """Runs of percent-encoded text; no escape is split."""
    start = 0
    while start < len(escaped):
        end = start + size
        if "%" in escaped[end - 2 : end]:
            end = escaped.rindex("%", start, end)
        yield escaped[start:end]
        start = end


def _folded(start: str, words: list[str], separator: str) -> str:
    """A field of words, with a line end wherever the next word would go beyond the line; never before the first."""
    lines: list[str] = []
    line = start + words[0]
    for word in words[1:]:
        if len(line) - line.rfind("\n") + len(separator) + len(word) > LINE_CHARACTERS:
            lines.append(line + separator.rstrip(" "))
            line = " " + word
        else:
            line += separator + word
    lines.append(line)
    return "\r\n".join(lines) + "\r\n"
