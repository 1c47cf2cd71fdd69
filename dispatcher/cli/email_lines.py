"""A JSON Lines file of emails, read as a stream: each line is an email or the reason why it is none."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import orjson

from dispatcher.domain.email import Email
from dispatcher.domain.json_names import has_name_twice
from dispatcher.errors import InvalidEmail

MAX_LINE_OCTETS: Final = 128 * 1024 * 1024
"""Above the largest email that is accepted, even with every character of its body escaped; bounds our memory."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a line's email was not accepted.

    Attributes:
        line: Its number in the file, from 1.
        field: The email's field that is to blame; `line` where the line as a whole cannot be read.
        reason: Without the field's value.
    """

    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        names_itself = self.field == "line" or self.reason.startswith(f"{self.field} ")
        return f"line {self.line}: {'' if names_itself else f'{self.field}: '}{self.reason}"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One line that is not blank.

    Attributes:
        number: From 1, blank lines counted.
        end: Octets of the file up to its end.
        octets: Its length.
        content: The email, or why it is none.
    """

    number: int
    end: int
    octets: int
    content: Email | Refusal


def read_entries(file: BinaryIO, *, allowed_headers: Collection[str] = ()) -> Iterator[FileEntry]:
    """The lines of a file that are not blank, one at a time.

    Args:
        allowed_headers: As for `Email`.
    """
    end = 0
    for number, (text, octets) in enumerate(_lines(file), start=1):
        end += octets
        if text is None:
            refusal = Refusal(number, "line", f"has more than {MAX_LINE_OCTETS} octets")
            yield FileEntry(number, end, 0, refusal)
        elif text and not text.isspace():
            yield FileEntry(number, end, octets, _email(number, text, allowed_headers))


def _lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """Each line and its length; None for one that is too long to be kept."""
    mark = _BYTE_ORDER_MARK
    while text := file.readline(MAX_LINE_OCTETS):
        if len(text) == MAX_LINE_OCTETS and not text.endswith(b"\n"):
            yield None, len(text) + _skip_line(file)
        else:
            yield text.removeprefix(mark), len(text)
        mark = b""


def _skip_line(file: BinaryIO) -> int:
    """Reads on to the line's end; returns the octets read."""
    octets = 0
    while text := file.readline(MAX_LINE_OCTETS):
        octets += len(text)
        if text.endswith(b"\n"):
            break
    return octets


def _email(number: int, text: bytes, allowed_headers: Collection[str]) -> Email | Refusal:
    try:
        value = orjson.loads(text)
        if has_name_twice(text, value):
            return Refusal(number, "line", "has a name twice in one object")
        return Email.from_json(value, allowed_headers=allowed_headers)
    except orjson.JSONDecodeError as error:
        return Refusal(number, "line", f"is not JSON ({error.msg}, character {error.pos + 1})")
    except InvalidEmail as error:
        return Refusal(number, error.field, error.reason)
