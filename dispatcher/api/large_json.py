"""JSON of many megabytes, parsed in small steps.

Nothing can interrupt one call into C: while orjson parses 39 MB, no other request gets an answer, and orjson needs
twice the body's size beside the result. So the long texts are cut out of the body first. orjson parses what remains,
the outline, with a stand-in for each text; each text is then decoded a piece at a time.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

import orjson

from dispatcher.api.problems import Problem
from dispatcher.domain.email_json import MAX_BASE64_CHARACTERS
from dispatcher.domain.email_rules import MAX_BODY_OCTETS
from dispatcher.domain.json_names import has_name_twice

MOST_VALUES: Final = 400_000
"""Objects, lists, and what is in them. A thousand emails have a tenth of it, unless all have many recipients."""
MOST_WIDE_CHARACTERS: Final = MAX_BODY_OCTETS + (1 << 20)
"""The most characters in long texts that are not pure ASCII: each may take four octets once parsed."""
MOST_OUTLINE_BYTES: Final = 16 << 20
LARGE_BYTES: Final = 4 << 20
"""From this size on, long texts are cut out of a body."""
_LONG_BYTES: Final = 256
_LONG_SCALAR_BYTES: Final = 4096
_STEP_BYTES: Final = 32 * 1024
"""The most that one call into C gets to look at."""

_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_COLON: Final = re.compile(rb"[ \t\n\r]*+:")
_SPACES: Final = re.compile(rb"[ \t\n\r]++")
_BETWEEN_SCALARS: Final = re.compile(rb"[ \t\n\r{}\[\],:]")


def parsed(body: bytearray) -> Any:
    """The JSON value that a body is; the body is empty afterwards, so that they are not in memory both.

    A text that is too long for its place in any email is cut off behind the most that is allowed there.

    Raises:
        Problem: it is none, is larger than any email, is nested deeper, or has a name twice in one object.
    """
    if len(body) < LARGE_BYTES:
        root = [_loaded(body)]
    else:
        mark = secrets.token_hex(8)  # no client can guess it, and so no text looks like a stand-in
        outline, texts = _cut(body, mark)
        root = [_loaded(outline)]
        _put_back(root, mark, body, texts)
    body.clear()
    return root[0]


def count_values(body: bytes | bytearray) -> int:
    """How many values a JSON text has, at most; exactly where that seems to be more than MOST_VALUES."""
    count = _count_marks(body, 0, len(body))
    if count <= MOST_VALUES:
        return count
    count = texts = end = 0
    while count <= MOST_VALUES and texts <= MOST_VALUES + 1:
        start = body.find(b'"', end)
        if start < 0:
            return count + _count_marks(body, end, len(body))
        count += _count_marks(body, end, start)
        texts, end = texts + 1, min(len(body), _text_end(body, start) + 1)  # the text may have these characters in it
    return MOST_VALUES + 1


def _count_marks(body: bytes | bytearray, start: int, end: int) -> int:
    count = 0
    for begin in range(start, end, _STEP_BYTES):
        until = min(end, begin + _STEP_BYTES)
        count += sum(body.count(mark, begin, until) for mark in b"{[,:")
        if count > MOST_VALUES:
            break
    return count


def _loaded(text: bytearray) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # Its message quotes nothing of the text.
        place = f"line {error.lineno}, column {error.colno}"
        raise Problem("malformed-json", f"{error.msg.capitalize()} ({place}).") from None
    if has_name_twice(text, value):
        # A proxy that checked the body before us may have read the other value.
        raise Problem("malformed-json", "An object has the same name twice.")
    return value


def _cut(body: bytearray, mark: str) -> tuple[bytearray, list[tuple[int, int]]]:
    """The outline, and where each text that was cut out begins and ends, without its quotes."""
    outline = bytearray()
    texts: list[tuple[int, int]] = []
    copied = position = count = wide = 0
    while (start := body.find(b'"', position)) >= 0:
        end = _text_end(body, start)
        if end >= len(body):
            raise Problem("malformed-json", f"The text that begins at octet {start} has no end.")
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
        if count > 2 * MOST_VALUES or len(outline) + position - copied > MOST_OUTLINE_BYTES:
            raise Problem("body-too-large", "It has too many short texts: send fewer emails at once.")
        if wide > MOST_WIDE_CHARACTERS:
            raise Problem("body-too-large", f"At most {MOST_WIDE_CHARACTERS} characters of text are read.")
    outline += body[copied:position]
    _add_gap(outline, body, position, len(body))
    return outline, texts


def _text_end(body: bytes | bytearray, start: int) -> int:
    """Where the quote is that ends the text whose first quote is at the start; the body's length if there is none."""
    quote = body.find(b'"', start + 1)
    position = body.find(b"\\", start + 1, quote) if quote >= 0 else start + 1
    if position < 0:
        return quote  # most texts have no escape, or a late one
    step = 64  # many texts are short, and a step is copied
    while True:
        piece = _without_escapes(body[position : position + step])
        if (found := piece.find(b'"')) >= 0:
            return position + found
        if position + step >= len(body):
            return len(body)
        position += step - piece.endswith(b"\\")  # the other half of that escape is in the next piece
        step = min(8 * step, _STEP_BYTES)


def _without_escapes(piece: bytes | bytearray) -> bytes | bytearray:
    """The piece with every escaped backslash and quote overwritten; it must not begin inside an escape."""
    return piece.replace(rb"\\", b"..").replace(rb"\"", b"..")


def _add_gap(outline: bytearray, body: bytearray, begin: int, end: int) -> None:
    """Adds what is between two texts, with a single space for many."""
    for start in range(begin, end - _LONG_SCALAR_BYTES, _LONG_SCALAR_BYTES):
        if not _BETWEEN_SCALARS.search(body, start, start + _LONG_SCALAR_BYTES):
            raise Problem("malformed-json", f"A number at octet {start} has thousands of digits.")
    for start in range(begin, end, _STEP_BYTES):
        outline += _SPACES.sub(b" ", body[start : min(end, start + _STEP_BYTES)])
        if len(outline) > MOST_OUTLINE_BYTES:
            raise Problem("body-too-large", "It has too many values: send fewer emails at once.")


def _count_wide(body: bytearray, begin: int, end: int) -> int:
    """How many characters a text has, at most, if one of them is beyond ASCII; else 0."""
    count, is_wide = end - begin, False
    for start in range(begin, end, _STEP_BYTES):
        until = min(end, start + _STEP_BYTES)
        is_wide = is_wide or not body[start:until].isascii()
        if body.find(b"\\", start, until) >= 0:
            escapes = body.count(rb"\u", start, min(end, until + 1))
            is_wide = is_wide or escapes > 0
            count -= 5 * (escapes - body.count(rb"\\u", start, min(end, until + 2)))  # an escaped backslash is none
    return count if is_wide else 0


def _put_back(root: list[Any], mark: str, body: bytearray, texts: list[tuple[int, int]]) -> None:
    """Replaces each stand-in by its text."""
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        for name, item in each.items() if type(each) is dict else enumerate(each):
            if type(item) is str:
                if item.startswith(mark):
                    most = MAX_BASE64_CHARACTERS if name == "content" else MAX_BODY_OCTETS
                    each[name] = _decoded(body, *texts[int(item[len(mark) :])], most)
            elif type(item) is dict or type(item) is list:
                waiting.append(item)


def _decoded(body: bytearray, start: int, end: int, most: int) -> str:
    """A text, or somewhat more of it than the most characters that are allowed."""
    pieces: list[str] = []
    count = 0
    while start < end and count <= most:
        piece = bytes(body[start : min(end, start + _STEP_BYTES)])
        if start + len(piece) < end:
            piece = piece[: _whole_characters(piece)]
        try:
            text = orjson.loads(b'"%b"' % piece)
        except orjson.JSONDecodeError as error:
            detail = f"{error.msg.capitalize()} (in the text at octet {start})."
            raise Problem("malformed-json", detail) from None
        pieces.append(text)
        count += len(text)
        start += len(piece)
    return "".join(pieces)


def _whole_characters(piece: bytes) -> int:
    """The size of the piece without a character that is cut in two at its end; it must begin with a whole one."""
    size = len(piece)
    marked = _without_escapes(piece)
    escape = marked.rfind(b"\\", size - 6)
    if escape >= 0 and escape + (6 if marked[escape + 1 : escape + 2] == b"u" else 2) > size:
        size = escape
    if _HIGH_SURROGATE.match(marked, size - 6, size):
        return size - 6  # its low surrogate follows
    for lead in range(size - 1, size - 4, -1):
        if piece[lead] >= 0xC0:
            length = 2 + (piece[lead] >= 0xE0) + (piece[lead] >= 0xF0)
            return lead if lead + length > size else size
        if piece[lead] < 0x80:
            break
    return size
