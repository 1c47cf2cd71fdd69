"""A file's name as the recipient's system reads it, in whatever characters it is written."""

from __future__ import annotations

import re
from typing import Final
from unicodedata import category, normalize

# Invisible characters that are not in Unicode's category Cf: joiners, fillers, variation selectors.
_UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
_END: Final = re.compile(r"[\s.]+\Z")


def plain_name(filename: str) -> str:
    """The name in Unicode's compatibility form (NFKC), without invisible characters."""
    if filename.isascii():
        return filename
    seen = "".join(character for character in filename if category(character) != "Cf")
    return normalize("NFKC", _UNSEEN.sub("", seen))


def endings_of(filename: str) -> set[str]:
    """The endings by which a system may choose the program that opens the file; in lower case, without the dot.

    Windows drops spaces and dots at the end of a name, and reads a colon as the end of a drive or the start of a
    stream, so the parts around it count as names, too.
    """
    parts = [_END.sub("", part) for part in plain_name(filename).casefold().split(":")]
    return {part.rpartition(".")[2] for part in parts if "." in part}
