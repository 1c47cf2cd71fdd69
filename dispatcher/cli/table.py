"""Tables: aligned, coloured and wrapped on a terminal; one line per row for other programs.

We do not use a library such as rich, because its import takes longer than most commands run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import zip_longest
from textwrap import wrap
from typing import Final, NamedTuple, TextIO
from unicodedata import combining, east_asian_width

import click

from dispatcher.cli.output import print_data, say
from dispatcher.domain.text import printable

_GAP: Final = "   "
_MARGIN: Final = " " * 4
_NARROWEST_FOLD: Final = 20
_RECORDS_BELOW: Final = 60
"""A narrower terminal leaves out no column: a table that does not fit becomes records."""
_MAX_CELL_CHARACTERS: Final = 4000
"""A longer text is cut, because all rows are as wide as the longest: an application can insert a key of a megabyte."""


class Styled(NamedTuple):
    """A cell's text and style: a colour, `bold`, `dim`, or nothing."""

    text: str
    style: str


class Table:
    """Rows of text below a heading and a rule; without names of columns, there is no heading and no rule.

    `right` has the numbers, from 0, of the columns that are aligned to the right. The words of column `fold` may be
    broken on a narrow terminal. `optional` names the columns that a terminal may leave out, the least important first.
    """

    def __init__(
        self, *columns: str, right: Iterable[int] = (), fold: int | None = None, optional: Iterable[str] = ()
    ) -> None:
        self._columns = tuple(Styled(name, "bold") for name in columns)
        self._right = frozenset(right)
        self._fold = fold
        self._optional = tuple(optional)
        self._rows: list[tuple[Styled, ...]] = []

    def add(self, *cells: object, style: str = "") -> None:
        """Adds a row. None becomes a dash; a `datetime` is shown in local time, without its zone. Control characters
        are replaced, and very long texts cut. `style` is the style of the cells that are not `Styled`."""
        styled = (cell if isinstance(cell, Styled) else Styled(_words(cell), style) for cell in cells)
        self._rows.append(tuple(Styled(_cut(printable(cell.text)), cell.style) for cell in styled))

    def add_gap(self) -> None:
        self._rows.append(())

    def show(self) -> bool:
        """Writes the table to stdout; returns False if the reader closed the pipe."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        table, left_out = (self, []) if width is None else self.within(width)
        is_open = print_data("\n".join(table.lines(width, coloured=is_coloured(sys.stdout))))
        if left_out:
            say(f"This terminal is too narrow for: {', '.join(left_out)}. --json has everything.")
        return is_open

    def within(self, width: int) -> tuple[Table, list[str]]:
        """This table without optional columns that do not fit, and the names of those that say something: the empty
        columns go first, then those with one value in all rows.

        The whole table if this is not enough, or if the terminal is so narrow that it shows records.
        """
        names, narrowest = [each.text for each in self._columns], self._narrowest()
        values = {name: {*cells[1:]} for name, cells in zip(names, self._texts(), strict=False)}
        empty = [name for name, found in values.items() if found == {"-"}]
        same = [name for name in self._optional if len(self._rows) > 1 and len(values.get(name, ())) == 1]
        kept = list(range(len(names)))
        for name in (*empty, *same, *self._optional):
            if sum(narrowest[at] for at in kept) <= _room(len(kept), width):
                break
            if name in names and names.index(name) in kept:
                kept.remove(names.index(name))
        if width < _RECORDS_BELOW or sum(narrowest[at] for at in kept) > _room(len(kept), width):
            return self, []
        return self._only(kept), [name for at, name in enumerate(names) if at not in kept and name not in empty]

    def _only(self, kept: Sequence[int]) -> Table:
        if not kept:  # a table without names of columns
            return self
        right = [at for at, each in enumerate(kept) if each in self._right]
        made = Table(right=right, fold=kept.index(self._fold) if self._fold in kept else None)
        made._columns = tuple(self._columns[at] for at in kept)
        made._rows = [tuple(row[at] for at in kept) if row else () for row in self._rows]
        return made

    def _narrowest(self) -> list[int]:
        """The least width of each column: its longest word, except in column `fold`."""
        columns = self._texts()
        return [
            min(max(map(_width, cells)), _NARROWEST_FOLD)
            if at == self._fold
            else max(_width(word) for cell in cells for word in cell.split(" "))
            for at, cells in enumerate(columns)
        ]

    def _texts(self) -> list[list[str]]:
        shown = [self._columns, *self._rows] if self._columns else self._rows
        return [[cell.text for cell in cells] for cells in zip(*filter(None, shown), strict=True)]

    def lines(self, width: int | None = None, *, coloured: bool = False) -> list[str]:
        """The table's lines, at most `width` characters long: cells are wrapped. If the longest words (except in column
        `fold`) do not fit side by side, each row becomes a record: one line per field."""
        shown = [self._columns, *self._rows] if self._columns else self._rows
        widths = [max(map(_width, cells)) for cells in self._texts()]
        if width is not None:
            narrowest = self._narrowest()
            if self._columns and sum(narrowest) > _room(len(widths), width):
                return self._records(width, coloured=coloured)
            widths = _fitted(widths, narrowest, width)
        drawn = [self._lines(row, widths, coloured) if row else [""] for row in shown]
        if self._columns:
            drawn.insert(1, ["─" * sum([*widths, len(_GAP) * (len(widths) - 1)])])
        return [line for row in drawn for line in row]

    def _records(self, width: int, *, coloured: bool) -> list[str]:
        """Breaks words only in column `fold`, so ids can be copied."""
        fields = Table(fold=1 if self._fold is not None else None)
        for row in filter(None, self._rows):
            for name, cell in zip(self._columns, row, strict=True):
                if cell.text != "-":
                    fields.add(name, cell)
            fields.add_gap()
        return fields.lines(width, coloured=coloured)[:-1]

    def _lines(self, row: Sequence[Styled], widths: list[int], coloured: bool) -> list[str]:
        cells = [_wrapped(cell.text, width) for cell, width in zip(row, widths, strict=True)]
        lines = []
        for parts in zip_longest(*cells, fillvalue=""):
            padded = []
            for at, (part, cell, width) in enumerate(zip(parts, row, widths, strict=True)):
                space = " " * (width - _width(part))
                text = in_style(part, cell.style) if coloured else part
                padded.append(space + text if at in self._right else text + space)
            lines.append(_GAP.join(padded).rstrip())
        return lines


def side_by_side(tables: Sequence[Table], width: int, *, coloured: bool) -> list[str]:
    """The lines of several tables, side by side if they fit into the width, otherwise one below the other."""
    drawn = [table.lines(coloured=coloured) for table in tables]
    widths = [max(map(_width, table.lines()), default=0) for table in tables]
    if sum(widths) + len(_MARGIN) * (len(tables) - 1) > width:
        return [line for lines in drawn for line in [*lines, ""]][:-1]
    rows = zip_longest(*drawn, fillvalue="")
    return [
        _MARGIN.join(part + " " * (wide - columns_of(part)) for part, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def is_coloured(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and NO_COLOR is not set."""
    return is_redrawable(stream) and not os.environ.get("NO_COLOR")


def is_redrawable(stream: TextIO) -> bool:
    """Whether a stream is a terminal that supports escape sequences."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL_CHARACTERS else text[:_MAX_CELL_CHARACTERS] + "…"


def _words(cell: object) -> str:
    if isinstance(cell, datetime):
        return cell.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return "-" if cell is None else str(cell)


def in_style(text: str, style: str) -> str:
    if not text or not style:
        return text
    return click.style(text, **{style: True}) if style in ("bold", "dim") else click.style(text, fg=style)


def _fitted(widths: list[int], narrowest: list[int], wanted: int) -> list[int]:
    """Narrows the widest columns, at most to their longest words, because an operator could not copy an id that is
    broken in two. If the table cannot fit, returns `widths` unchanged: then the terminal breaks the lines."""
    room = _room(len(widths), wanted)
    if sum(narrowest) > room:
        return widths
    fitted = list(widths)
    while sum(fitted) > room:
        spare = max(range(len(fitted)), key=lambda at: (fitted[at] > narrowest[at], fitted[at]))
        fitted[spare] -= 1
    return fitted


def _room(columns: int, width: int) -> int:
    return width - len(_GAP) * (columns - 1)


def _wrapped(cell: str, width: int) -> list[str]:
    if _width(cell) <= width:
        return [cell]
    characters = width * len(cell) // _width(cell)  # fewer than `width` if some characters are two columns wide
    return wrap(cell, max(characters, 1), break_on_hyphens=False) or [""]


def columns_of(line: str) -> int:
    """The width of a line on a terminal, without its escape sequences."""
    return _width(click.unstyle(line))


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)
