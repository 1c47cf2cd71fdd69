"""Interprets file names, in any script, as the recipient's system does."""

from __future__ import annotations

import re
from typing import Final
from unicodedata import category, normalize

# Invisible characters outside Unicode's category Cf: joiners, fillers, variation selectors.
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
_END: Final = re.compile(r"[\s.]+\Z")


def plain_name(filename: str) -> str:
    """The name in Unicode's compatibility form (NFKC), without invisible characters."""
    if filename.isascii():
        return filename
    visible = "".join(character for character in filename if category(character) != "Cf")
    return normalize("NFKC", _INVISIBLE.sub("", visible))


def endings_of(filename: str) -> set[str]:
    """The extensions by which a system may choose the program that opens the file: lower case, without the dot.

    Windows removes spaces and dots at the end of a name. In Windows, a colon ends the name of a drive, or begins the
    name of a file's stream. So the text before a colon and the text after it each count as a name.
    """
    parts = [_END.sub("", part) for part in plain_name(filename).casefold().split(":")]
    return {part.rpartition(".")[2] for part in parts if "." in part}
