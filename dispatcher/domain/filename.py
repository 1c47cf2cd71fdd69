"""What a file's name is to who opens it, however it is written."""

from __future__ import annotations

import re
from typing import Final
from unicodedata import category, normalize

# What nothing shows and Unicode calls no format character (Cf): joiners, fillers, variation selectors.
_UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
_END: Final = re.compile(r"[\s.]+\Z")


def plain_name(filename: str) -> str:
    """The name in Unicode's compatibility form (NFKC), and without the characters that nothing shows."""
    if filename.isascii():
        return filename
    seen = "".join(character for character in filename if category(character) != "Cf")
    return normalize("NFKC", _UNSEEN.sub("", seen))


def endings_of(filename: str) -> set[str]:
    """The endings, in lower case and without the dot, by one of which a system may choose what opens the file.

    Windows drops spaces and dots at the end of a name, and takes what stands around a colon for a drive or a stream of
    its own: each part counts.
    """
    parts = [_END.sub("", part) for part in plain_name(filename).casefold().split(":")]
    return {part.rpartition(".")[2] for part in parts if "." in part}
