"""What a text may hold, by where it will stand: in a header, before a reader's trusting eye, or in a body.

Each rule gives the reason why a text is refused, to be put after the field's name, or None; never any of the text.
"""

from __future__ import annotations

import re
from typing import Final

# C0, DEL and C1 controls, and the two Unicode separators at which `str.splitlines` and some mail software break lines.
_BREAKS_A_LINE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Embeddings, overrides and isolates. The marks U+200E and U+200F stay allowed: Hebrew and Arabic names need them.
_REORDERS: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
# Laxer than RFC 2047, as those are who decode it: empty charsets, spaces and further question marks.
_ENCODED_WORD: Final = re.compile(r"=\?[^?]*\?[bq]\?.*\?=", re.IGNORECASE)


def header_fault(text: str) -> str | None:
    """Why a text cannot stand in a header.

    An encoded word (RFC 2047) is refused because receivers, and Python's own `email` package, would decode it: what it
    hides, line breaks included, has not been validated.
    """
    if not text.isprintable():
        if _BREAKS_A_LINE.search(text):
            return "contains a control character or a line break"
        if _SURROGATE.search(text):
            return "contains a lone surrogate, which is not Unicode text"
    if "=?" in text and _ENCODED_WORD.search(text):
        return "contains an encoded word (RFC 2047); give the text itself"
    return None


def name_fault(text: str) -> str | None:
    """Why a text cannot be the name of a person or a file: as in a header, and nothing that reorders what is read."""
    if not text.isprintable() and _REORDERS.search(text):
        return "contains a character that reverses the reading direction"
    return header_fault(text)


def printable(text: str) -> str:
    """The text for a terminal: a replacement character in place of each unprintable one, such as an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_lines(text: str) -> str:
    """As `printable`, but keeps line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def body_fault(text: str) -> str | None:
    """Why a text cannot be a body: PostgreSQL's text holds no NUL, and UTF-8 no lone surrogate."""
    if "\0" in text:
        return "contains a NUL character"
    if not text.isascii() and _SURROGATE.search(text):
        return "contains a lone surrogate, which is not Unicode text"
    return None
