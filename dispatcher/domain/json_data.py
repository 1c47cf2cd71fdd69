"""JSON that callers give: objects with a duplicate name, and the data for a provider's template.

RFC 8259 does not define which value of a duplicate name is used, and parsers differ. orjson silently keeps the last
value. Python's parser can report duplicates but is ten times slower. So names are counted twice: in the parsed value,
and in the text, where a name is a string before a colon. If an object has a duplicate name, the parsed value has fewer
names than the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

from dispatcher.domain.text import body_fault
from dispatcher.errors import InvalidEmail

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


NO_DATA: Final = MappingProxyType[str, object]({})
MAX_DATA_OCTETS: Final = 256 * 1024
"""The most octets of the data as JSON. SES accepts no more."""
MAX_DEPTH: Final = 16
"""The most levels of nesting: more than any template needs, and far below the stack limit of JSON parsers."""
MAX_INTEGER: Final = 2**53 - 1
"""The largest integer that all JSON parsers read as the same number (RFC 8259, section 6)."""


def checked_data(_field: str, value: object) -> Mapping[str, object]:
    """The validated data; the top level is read-only. Raises InvalidEmail if the value is not an object, or contains a
    value that JSON or PostgreSQL cannot represent."""
    if not isinstance(value, Mapping):
        raise InvalidEmail("template_data", "must be a JSON object")
    if not value:
        return NO_DATA
    _check(value, MAX_DEPTH)
    if len(canonical_data(value).encode()) > MAX_DATA_OCTETS:
        raise InvalidEmail("template_data", f"is larger than {MAX_DATA_OCTETS} bytes as JSON")
    return MappingProxyType(dict(value))


def canonical_data(value: Mapping[str, object]) -> str:
    """The data as JSON with sorted names, so that equal data gives equal text."""
    return json.dumps(dict(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _check(value: object, depth: int) -> None:
    if depth == 0:
        raise InvalidEmail("template_data", f"is nested deeper than {MAX_DEPTH} levels")
    match value:
        case Mapping():
            for name, item in value.items():
                if not isinstance(name, str):
                    raise InvalidEmail("template_data", "has an object key that is not a string")
                _check(name, depth)
                _check(item, depth - 1)
        case list() | tuple():
            for item in value:
                _check(item, depth - 1)
        case _:
            _check_scalar(value)


def _check_scalar(value: object) -> None:
    match value:
        case None | bool():
            return
        case str():
            if fault := body_fault(value):
                raise InvalidEmail("template_data", fault)
        case int():
            if abs(value) > MAX_INTEGER:
                reason = "contains an integer beyond 2**53, which JSON readers may round; pass it as a string"
                raise InvalidEmail("template_data", reason)
        case float():
            if value != value or value in (float("inf"), float("-inf")):
                raise InvalidEmail("template_data", "contains NaN or an infinite number, which JSON does not allow")
        case _:
            raise InvalidEmail("template_data", "contains a value that JSON cannot represent")
