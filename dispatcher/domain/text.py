"""Rules for texts, depending on their use: in a header, as a name that a reader sees, or in a body.

Each rule returns why a text is refused, as a phrase to put after the field's name, or None if the text is allowed. The
phrase never quotes the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

# C0, DEL and C1 controls, and two Unicode separators at which `str.splitlines` and some mail software break lines.
_BREAKS_A_LINE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Characters that change the reading direction: embeddings, overrides and isolates. U+200E and U+200F stay allowed,
# because Hebrew and Arabic names need them.
_REORDERS: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
# This pattern is laxer than RFC 2047, like many decoders: it matches empty charsets, spaces and further question marks.
_ENCODED_WORD: Final = re.compile(r"=\?[^?]*\?[bq]\?.*\?=", re.IGNORECASE)


def header_fault(text: str) -> str | None:
    """Why a text is not allowed in a header; None if it is allowed. An encoded word (RFC 2047) is refused: receivers
    would decode it, and its hidden content, such as line breaks, has not been validated."""
    if not text.isprintable():
        if _BREAKS_A_LINE.search(text):
            return "contains a control character or a line break"
        if _SURROGATE.search(text):
            return "contains a lone surrogate, which is not valid Unicode"
    if "=?" in text and _ENCODED_WORD.search(text):
        return "contains an encoded word (RFC 2047); give the decoded text"
    return None


def name_fault(text: str) -> str | None:
    """Why a text is not allowed as a display name or file name: as `header_fault`, and for characters that change the
    reading direction."""
    if not text.isprintable() and _REORDERS.search(text):
        return "contains a character that changes the reading direction"
    return header_fault(text)


def printable(text: str) -> str:
    """The text for a terminal. Replaces each unprintable character, such as an escape, with U+FFFD."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_lines(text: str) -> str:
    """Like `printable`, but keeps line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def body_fault(text: str) -> str | None:
    """Why a text is not allowed in a body: PostgreSQL cannot store NUL, and UTF-8 has no lone surrogates."""
    if "\0" in text:
        return "contains a NUL character"
    if not text.isascii() and _SURROGATE.search(text):
        return "contains a lone surrogate, which is not valid Unicode"
    return None


MAX_KEY_CHARACTERS: Final = 255
"""The longest message key or correlation id. In UTF-8, it always fits an index entry of PostgreSQL (2,704 octets)."""
MAX_TENANT_CHARACTERS: Final = 100
"""The longest tenant id. Every log line and index entry contains the id, so the id must be short."""
MAX_METADATA_CHARACTERS: Final = 256
METADATA_KEY_PATTERN: Final = "[A-Za-z0-9_.-]{1,64}"
DEFAULT_TENANT: Final = "default"
TENANT_PATTERN: Final = "[A-Za-z0-9][A-Za-z0-9._:-]*"
MAX_TOPIC_CHARACTERS: Final = 64
TOPIC_PATTERN: Final = f"[a-z0-9][a-z0-9._-]{{0,{MAX_TOPIC_CHARACTERS - 1}}}"
"""The name of a topic. Lower case only, because a recipient who left `news` must not get `News`."""


def shown(name: object) -> str:
    """The name of a field or header for an error message: at most 40 characters, `?` for each unprintable character."""
    text = name if isinstance(name, str) else type(name).__name__
    printable = "".join(character if character.isprintable() else "?" for character in text[:41])
    return printable if len(text) <= 40 else f"{printable[:40]}…"


def unknown_fault(name: object, known: Iterable[str]) -> str:
    """What is wrong with a field that does not exist: names the field that was probably meant, or all fields."""
    near = _nearest(shown(name).lower(), names := tuple(known))
    return f"is unknown; did you mean {near}?" if near else f"is unknown; allowed: {', '.join(names)}"


@lru_cache(maxsize=256)  # all emails of a batch may have the same mistake
def _nearest(given: str, names: tuple[str, ...]) -> str | None:
    from difflib import get_close_matches  # here, because it takes as long as all records

    letters = set(given)
    # The comparison takes a tenth of a millisecond per name, so it is left out for names with other letters.
    alike = [each for each in names if abs(len(each) - len(given)) < 4 and 2 * len(letters & {*each}) > len(letters)]
    return next(iter(get_close_matches(given, alike, 1)), None)
