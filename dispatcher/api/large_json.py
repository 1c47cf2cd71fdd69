"""Counts and parses the JSON values of request bodies.

A call into C holds the GIL: while orjson parses 39 MB, no other request is served. Decision 0087 has the figures.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from dispatcher.admission.problems import Problem
from dispatcher.domain.json_data import has_duplicate_name

MAX_VALUES: Final = 400_000
"""The most JSON values: objects, lists and their elements. A thousand emails have about a tenth of this number, unless
all of them have many recipients."""
_MARKS: Final = b"{[,:"
_STEP_BYTES: Final = 32 * 1024
"""The most bytes that one call into C counts."""


def parse(body: bytearray) -> Any:
    """Parses a body. Empties the body before returning, so that only the result stays in memory.

    Raises:
        Problem: `malformed-json`: the body is not JSON, is nested too deeply, or repeats a name in one object.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # orjson's messages quote nothing from the body, so it is safe to put them into the response.
        place = f"line {error.lineno}, column {error.colno}"
        raise Problem("malformed-json", f"{error.msg.capitalize()} ({place}).") from None
    if has_duplicate_name(body, value):
        # If an object has a name twice, some parsers use the first value, and others the last value. A proxy might have
        # checked one of the values, and this API would use the other value.
        raise Problem("malformed-json", "An object has the same name twice.")
    body.clear()
    return value


def count_values(body: bytes | bytearray, *, exact: bool = True) -> int:
    """Estimates without parsing how many values a JSON text has. Stops at MAX_VALUES + 1.

    The estimate is the number of the characters `{[,:` outside strings. If the whole text, with the strings, has at
    most MAX_VALUES such characters, returns their number instead, because counting them is quicker.

    Args:
        exact: False to count the characters inside strings even if there are more of them.
    """
    count = 0
    for start in range(0, len(body), _STEP_BYTES):
        count += sum(body.count(mark, start, start + _STEP_BYTES) for mark in _MARKS)
        if count > MAX_VALUES:
            return _count_outside_strings(body) if exact else MAX_VALUES + 1
    return count


def _count_outside_strings(body: bytes | bytearray) -> int:
    count = quotes = 0
    escape = b""  # a backslash at the end of the last piece
    for start in range(0, len(body), _STEP_BYTES):
        piece = (escape + body[start : start + _STEP_BYTES]).replace(rb"\\", b"").replace(rb"\"", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(escape).split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        count += sum(outside.count(mark) for mark in _MARKS)
        quotes += len(parts) - 1
        if count > MAX_VALUES or quotes > 2 * MAX_VALUES + 2:  # in JSON, a mark is between any two strings
            return MAX_VALUES + 1
    return count
