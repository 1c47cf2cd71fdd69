"""Parses JSON of many megabytes in small steps.

A call into C cannot be interrupted: while orjson parses 39 MB, no other request is served, and orjson needs memory of
twice the body's size in addition to the result. So the long strings are extracted first. orjson parses the outline: the
body with a placeholder for each long string. Then each long string is decoded in pieces.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

import orjson

from dispatcher.api.problems import Problem
from dispatcher.domain.email_json import MAX_BASE64_CHARACTERS
from dispatcher.domain.email_rules import MAX_BODY_OCTETS
from dispatcher.domain.json_data import has_duplicate_name

MAX_VALUES: Final = 400_000
"""The most JSON values: objects, lists and their elements. A thousand emails have about a tenth of this number, unless
all of them have many recipients."""
MAX_WIDE_CHARACTERS: Final = MAX_BODY_OCTETS + (1 << 20)
"""The most characters that all long strings together may have. Strings of pure ASCII are not counted, because after
parsing they need one byte per character. In any other string, each character may need four bytes."""
MAX_OUTLINE_BYTES: Final = 16 << 20
LARGE_BYTES: Final = 4 << 20
"""From this size, the long strings of a body are extracted before the body is parsed."""
_LONG_BYTES: Final = 256
_LONG_SCALAR_BYTES: Final = 4096
_STEP_BYTES: Final = 32 * 1024
"""The most bytes that one call into C processes."""

_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_COLON: Final = re.compile(rb"[ \t\n\r]*+:")
_SPACES: Final = re.compile(rb"[ \t\n\r]++")
_BETWEEN_SCALARS: Final = re.compile(rb"[ \t\n\r{}\[\],:]")


def parse(body: bytearray) -> Any:
    """Parses a body. Empties the body before returning, so that only the result stays in memory.

    A string that is longer than any email allows is truncated. Even the truncated string is too long, so validation
    refuses it.

    Raises:
        Problem: `malformed-json`: the body is not JSON, is nested too deeply, or repeats a name in one object.
            `body-too-large`: the body is larger than any email or batch.
    """
    if len(body) < LARGE_BYTES:
        root = [_load(body)]
    else:
        mark = secrets.token_hex(8)  # random, so that no client can forge a placeholder
        outline, texts = _extract_texts(body, mark)
        root = [_load(outline)]
        _restore_texts(root, mark, body, texts)
    body.clear()
    return root[0]


def count_values(body: bytes | bytearray, *, exact: bool = True) -> int:
    """Estimates without parsing how many values a JSON text has. Stops at MAX_VALUES + 1.

    The estimate is the number of the characters `{[,:` outside strings. If the whole text, with the strings, has at
    most MAX_VALUES such characters, returns their number instead, because counting them is quicker.

    Args:
        exact: False to count the characters inside strings even if there are more of them.
    """
    count = _count_marks(body, 0, len(body))
    if count <= MAX_VALUES or not exact:
        return count
    count = texts = end = 0
    while count <= MAX_VALUES and texts <= MAX_VALUES + 1:
        start = body.find(b'"', end)
        if start < 0:
            return count + _count_marks(body, end, len(body))
        count += _count_marks(body, end, start)
        texts, end = texts + 1, min(len(body), _text_end(body, start) + 1)  # `end` is the position after the string
    return MAX_VALUES + 1


def _count_marks(body: bytes | bytearray, start: int, end: int) -> int:
    count = 0
    for begin in range(start, end, _STEP_BYTES):
        until = min(end, begin + _STEP_BYTES)
        count += sum(body.count(mark, begin, until) for mark in b"{[,:")
        if count > MAX_VALUES:
            break
    return count


def _load(text: bytearray) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # orjson's messages quote nothing from the body, so it is safe to put them into the response.
        place = f"line {error.lineno}, column {error.colno}"
        raise Problem("malformed-json", f"{error.msg.capitalize()} ({place}).") from None
    if has_duplicate_name(text, value):
        # If an object has a name twice, some parsers use the first value, and others the last value. A proxy might have
        # checked one of the values, and this API would use the other value.
        raise Problem("malformed-json", "An object has the same name twice.")
    return value


def _extract_texts(body: bytearray, mark: str) -> tuple[bytearray, list[tuple[int, int]]]:
    """Returns the outline, and the start and end of each long string, without its quotes.

    The outline is the body with a placeholder for each long string: `mark`, followed by the number of the string.
    """
    outline = bytearray()
    texts: list[tuple[int, int]] = []
    copied = position = count = wide = 0
    while (start := body.find(b'"', position)) >= 0:
        end = _text_end(body, start)
        if end >= len(body):
            raise Problem("malformed-json", f"The string that begins at byte {start} has no closing quote.")
        if start - position > _LONG_BYTES:
            outline += body[copied:position]
            _add_gap(outline, body, position, start)
            copied = start
        if end - start > _LONG_BYTES and not _COLON.match(body, end + 1):
            outline += body[copied:start]
            outline += b'"%b%d"' % (mark.encode(), len(texts))
            texts.append((start + 1, end))
            wide += _count_wide(body, start + 1, end)
            copied = end + 1
        position = end + 1
        count += 1
        if count > 2 * MAX_VALUES or len(outline) + position - copied > MAX_OUTLINE_BYTES:
            raise Problem("body-too-large", "The body has too many strings. Send fewer emails per request.")
        if wide > MAX_WIDE_CHARACTERS:
            detail = f"Long strings that are not pure ASCII may have {MAX_WIDE_CHARACTERS:,} characters in total."
            raise Problem("body-too-large", detail)
    outline += body[copied:position]
    _add_gap(outline, body, position, len(body))
    return outline, texts


def _text_end(body: bytes | bytearray, start: int) -> int:
    """The position of the closing quote of the string that begins at `start`; the body's length if there is none."""
    quote = body.find(b'"', start + 1)
    position = body.find(b"\\", start + 1, quote) if quote >= 0 else start + 1
    if position < 0:
        return quote  # the common case: no backslash before the first quote
    # Small at first: the loop copies a piece of this size, and most strings are short.
    step = 64
    while True:
        piece = _without_escapes(body[position : position + step])
        if (found := piece.find(b'"')) >= 0:
            return position + found
        if position + step >= len(body):
            return len(body)
        # If the piece ends with a backslash, the backslash begins an escape. So the next piece begins with it.
        position += step - piece.endswith(b"\\")
        step = min(8 * step, _STEP_BYTES)


def _without_escapes(piece: bytes | bytearray) -> bytes | bytearray:
    """Overwrites escaped backslashes and quotes in a piece of a string. The first quote left is the string's end.

    The piece must not begin inside an escape.
    """
    return piece.replace(rb"\\", b"..").replace(rb"\"", b"..")


def _add_gap(outline: bytearray, body: bytearray, begin: int, end: int) -> None:
    """Adds the bytes between two strings to the outline, but reduces each run of whitespace to one space."""
    for start in range(begin, end - _LONG_SCALAR_BYTES, _LONG_SCALAR_BYTES):
        if not _BETWEEN_SCALARS.search(body, start, start + _LONG_SCALAR_BYTES):
            raise Problem("malformed-json", f"A number at byte {start} has thousands of digits.")
    for start in range(begin, end, _STEP_BYTES):
        outline += _SPACES.sub(b" ", body[start : min(end, start + _STEP_BYTES)])
        if len(outline) > MAX_OUTLINE_BYTES:
            raise Problem("body-too-large", "The body has too many values. Send fewer emails per request.")


def _count_wide(body: bytearray, begin: int, end: int) -> int:
    """The most characters that a string can have, by its bytes and escapes; 0 if the string is pure ASCII."""
    count, is_wide = end - begin, False
    for start in range(begin, end, _STEP_BYTES):
        until = min(end, start + _STEP_BYTES)
        is_wide = is_wide or not body[start:until].isascii()
        if body.find(b"\\", start, until) >= 0:
            escapes = body.count(rb"\u", start, min(end, until + 1))
            is_wide = is_wide or escapes > 0
            # An escape such as \u00e4 has six characters, and means one. But \\u does not begin such an escape:
            # its first backslash escapes the second.
            count -= 5 * (escapes - body.count(rb"\\u", start, min(end, until + 2)))
    return count if is_wide else 0


def _restore_texts(root: list[Any], mark: str, body: bytearray, texts: list[tuple[int, int]]) -> None:
    """Replaces the placeholders in the parsed outline with the long strings, decoded.

    Args:
        root: A list whose only element is the parsed outline.
        mark: The text with which every placeholder begins.
        texts: The start and end of each long string in the body.
    """
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        for name, item in each.items() if type(each) is dict else enumerate(each):
            if type(item) is str:
                if item.startswith(mark):
                    max_characters = MAX_BASE64_CHARACTERS if name == "content" else MAX_BODY_OCTETS
                    each[name] = _decode(body, *texts[int(item[len(mark) :])], max_characters)
            elif type(item) is dict or type(item) is list:
                waiting.append(item)


def _decode(body: bytearray, start: int, end: int, max_characters: int) -> str:
    """Decodes a string, but stops soon after `max_characters`."""
    pieces: list[str] = []
    count = 0
    while start < end and count <= max_characters:
        piece = bytes(body[start : min(end, start + _STEP_BYTES)])
        if start + len(piece) < end:
            piece = piece[: _whole_characters(piece)]
        try:
            text = orjson.loads(b'"%b"' % piece)
        except orjson.JSONDecodeError as error:
            detail = f"{error.msg.capitalize()} (in the string at byte {start})."
            raise Problem("malformed-json", detail) from None
        pieces.append(text)
        count += len(text)
        start += len(piece)
    return "".join(pieces)


def _whole_characters(piece: bytes) -> int:
    """The number of bytes up to the end of the piece's last complete character.

    The piece must begin with a whole character.
    """
    size = len(piece)
    marked = _without_escapes(piece)
    escape = marked.rfind(b"\\", size - 6)
    if escape >= 0 and escape + (6 if marked[escape + 1 : escape + 2] == b"u" else 2) > size:
        size = escape
    if _HIGH_SURROGATE.match(marked, size - 6, size):
        # The piece ends with a high surrogate. Leave it to the next piece, which also contains its low surrogate.
        return size - 6
    for lead in range(size - 1, size - 4, -1):
        if piece[lead] >= 0xC0:
            length = 2 + (piece[lead] >= 0xE0) + (piece[lead] >= 0xF0)
            return lead if lead + length > size else size
        if piece[lead] < 0x80:
            break
    return size
