"""Tables of plain text: what `dlq` and `held` show, hundreds of rows of it, while somebody waits.

Rich would draw them, too, but loading it and laying out a page takes as long as everything else that `dlq list` does.
It stays for what has colours or moves.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Final
from unicodedata import combining, east_asian_width

from dispatcher.cli.output import print_data
from dispatcher.domain.text import printable

_GAP: Final = "   "


class TextTable:
    """Rows of words below a heading and a rule.

    Args:
        columns: What the heading says; without one there is none, and the first row says how many columns there are.
        right: Columns, by number, that are aligned to the right.
    """

    def __init__(self, *columns: str, right: Iterable[int] = ()) -> None:
        self._columns = columns
        self._right = frozenset(right)
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: object) -> None:
        """One row more; what is no text becomes its words, and a character that does not print, a mark."""
        self._rows.append(tuple(printable(str(cell)) for cell in cells))

    def __len__(self) -> int:
        return len(self._rows)

    def show(self) -> bool:
        """Writes it to stdout; lines are wrapped on a terminal alone. Returns whether somebody still reads."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        return print_data("\n".join(self.lines(width)))

    def lines(self, width: int | None = None) -> list[str]:
        """As lines that are at most so wide, as far as cells can be wrapped."""
        shown = [self._columns, *self._rows] if self._columns else self._rows
        columns = list(zip(*shown, strict=True))
        widths = [max(map(_width, cells)) for cells in columns]
        if width is not None:
            widths = _fitted(widths, [_longest_word(cells) for cells in columns], width)
        drawn = [self._lines(row, widths) for row in shown]
        if self._columns:
            drawn.insert(1, ["─" * sum([*widths, len(_GAP) * (len(widths) - 1)])])
        return [line for row in drawn for line in row]

    def _lines(self, row: Sequence[str], widths: list[int]) -> list[str]:
        """A row: as many lines as its highest cell."""
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, cells))
        padded = [[*lines, *[""] * (height - len(lines))] for lines in cells]
        return [self._line(parts, widths) for parts in zip(*padded, strict=True)]

    def _line(self, parts: Sequence[str], widths: list[int]) -> str:
        padded = []
        for number, (part, width) in enumerate(zip(parts, widths, strict=True)):
            space = " " * (width - _width(part))
            padded.append(space + part if number in self._right else part + space)
        return _GAP.join(padded).rstrip()


def _fitted(widths: list[int], narrowest: list[int], wanted: int) -> list[int]:
    """Widths with which all columns fit: the widest are made narrower, down to their longest word.

    Where that does not do, they stay as they are, and the terminal breaks the lines: an id that is cut in pieces is
    copied by nobody.
    """
    room = wanted - len(_GAP) * (len(widths) - 1)
    if sum(narrowest) > room:
        return widths
    fitted = list(widths)
    while sum(fitted) > room:
        spare = max(range(len(fitted)), key=lambda at: (fitted[at] > narrowest[at], fitted[at]))
        fitted[spare] -= 1
    return fitted


def _longest_word(cells: Iterable[str]) -> int:
    return max((_width(word) for cell in cells for word in cell.split(" ")), default=0)


def _wrapped(cell: str, width: int) -> list[str]:
    if _width(cell) <= width:
        return [cell]
    characters = width * len(cell) // _width(cell)  # fewer where some of them are wide
    return wrap(cell, max(characters, 1), break_on_hyphens=False) or [""]


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)
