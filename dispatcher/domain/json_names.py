"""Whether an object in a JSON text has a name twice: RFC 8259 leaves open which one counts, and parsers differ.

orjson keeps the last one and says nothing, and the parser that can tell is ten times slower. So names are counted
first: in the value, and in the text as quotes that a colon follows, of which there are never fewer. Only where the text
has more is it parsed again; a text within the value that looks like a name costs that, too, and nothing else.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any, Final

_NAME_END: Final = re.compile(rb'"[ \t\n\r]*:')


class _NamedTwice(Exception):
    pass


def has_name_twice(text: bytes, value: object) -> bool:
    """Whether a name stands twice in an object.

    Args:
        value: What the text was parsed as.
    """
    names = _count_names(value)
    # Not all at once: a hostile text has millions.
    if sum(1 for _ in islice(_NAME_END.finditer(text), names + 1)) == names:
        return False
    try:
        json.loads(text, object_pairs_hook=_checked)
    except _NamedTwice:
        return True
    except RecursionError:  # deeper than any email; where a name stands in it is nobody's concern
        return True
    return False


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


def _checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _NamedTwice
    return found
