"""Whether an object in a JSON text has a name twice: RFC 8259 leaves open which one counts, and parsers differ.

orjson keeps the last one and says nothing, and the parser that can tell is ten times slower. So names are counted: in
the value, and in the text, where each is a string that a colon follows. An object with a name twice has fewer.
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
    # There are never fewer of these than names. Not all at once: a hostile text has millions.
    if sum(1 for _ in islice(_NAME_END.finditer(text), names + 1)) == names:
        return False
    # Some may stand within a string. Without what is escaped, a quote begins a string or ends it.
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
