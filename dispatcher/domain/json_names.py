"""Detects an object with a duplicate name in a JSON text. RFC 8259 does not define which value is used, and parsers
differ.

orjson silently keeps the last value. Python's parser can report duplicates but is ten times slower. So this module
counts names twice: in the parsed value, and in the text, where a name is a string before a colon. If an object has a
duplicate name, the parsed value has fewer names than the text.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

_NAME_END: Final = re.compile(rb'"[ \t\n\r]*:')
_STRING: Final = re.compile(rb'"[^"]*+"[ \t\n\r]*+(:?)')


def has_duplicate_name(text: bytes | bytearray, value: object) -> bool:
    """Whether any object in the text, whose parsed form is `value`, has the same name twice."""
    names = _count_names(value)
    # In the text, a quote and a colon end each name. If there are as many such ends as names in the value, no name was
    # lost as a duplicate. The count stops early, because a hostile text can have millions of colons.
    if sum(1 for _ in islice(_NAME_END.finditer(text), names + 1)) == names:
        return False
    # Some of these ends can be inside strings, so find the strings. If `\\` and `\"` are removed, each remaining quote
    # starts or ends a string.
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    return sum(bool(string[1]) for string in _STRING.finditer(plain)) != names


def _count_names(value: object) -> int:
    count = 0
    pending = [value]
    while pending:
        each = pending.pop()
        if type(each) is dict:
            count += len(each)
            pending += [item for item in each.values() if type(item) is dict or type(item) is list]
        elif type(each) is list:
            pending += [item for item in each if type(item) is dict or type(item) is list]
    return count
