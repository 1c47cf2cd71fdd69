"""Whether an object in a JSON text has a name twice: RFC 8259 leaves open which one counts, and parsers differ.

orjson silently keeps the last one, and Python's own parser, which can report it, is ten times slower. So the names are
counted twice: in the value, and in the text, where a name is a string before a colon. The value of an object that has a
name twice has fewer of them.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

_NAME_END: Final = re.compile(rb'"[ \t\n\r]*:')
_STRING: Final = re.compile(rb'"[^"]*+"[ \t\n\r]*+(:?)')


def has_name_twice(text: bytes | bytearray, value: object) -> bool:
    """Whether a name stands twice in an object.

    Args:
        value: What the text was parsed as.
    """
    names = _count_names(value)
    # A text has at least as many colons as names. They are counted in steps, since a hostile text has millions.
    if sum(1 for _ in islice(_NAME_END.finditer(text), names + 1)) == names:
        return False
    # Some colons may be inside strings. Once escaped characters are removed, each quote begins or ends a string.
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    return sum(bool(string[1]) for string in _STRING.finditer(plain)) != names


def _count_names(value: object) -> int:
    count = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is dict:
            count += len(each)
            waiting += [item for item in each.values() if type(item) is dict or type(item) is list]
        elif type(each) is list:
            waiting += [item for item in each if type(item) is dict or type(item) is list]
    return count
