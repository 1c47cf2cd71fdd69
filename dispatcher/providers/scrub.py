"""A provider's words, made safe to store and to log: no addresses, no control characters, bounded."""

from __future__ import annotations

import re
from typing import Final

MAX_CHARACTERS: Final = 500
"""Enough for a policy sentence and its link; a hostile server fills no column with more."""
ADDRESS_WORD: Final = "<address>"

_READ_CHARACTERS: Final = 8 * MAX_CHARACTERS
"""What is looked at before cutting, so that a megabyte of words costs nothing."""
_SPECIAL: Final = re.compile(r"[^ -~]|@|%40|=40|\+40", re.IGNORECASE)
# White space but the space, C0 and C1 controls, zero-width and reordering marks, lone surrogates.
_UNPRINTABLE: Final = re.compile(
    r"(?:[^\S ]|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff])+"
)
_SPACES: Final = re.compile(r" {2,}")
# Whatever touches an at sign, look-alikes and escaped forms included: rather a word too much than a name left over. A
# quoted local part may hold spaces: "jo do"@example.org.
_ADDRESS: Final = re.compile(
    r"""<?(?:"[^"]{0,64}"|[^\s<>()\[\],;:"]*)(?:@|\uff20|\ufe6b|%40|=40|\+40)[^\s<>()\],;"]*>?""", re.IGNORECASE
)


def scrub(words: str) -> str:
    """The words on one line, each address replaced by `<address>`, at most `MAX_CHARACTERS` long.

    Whatever stands next to an at sign counts as an address, so that odd forms of one do not slip through. Scrubbing
    twice changes nothing more.
    """
    words = words[:_READ_CHARACTERS]
    if _SPECIAL.search(words):
        words = _ADDRESS.sub(ADDRESS_WORD, _UNPRINTABLE.sub(" ", words))
    words = _SPACES.sub(" ", words).strip(" ")
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 1] + "…"
