"""Rows of a list as CSV, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any, Final

from dispatcher.domain.text import printable_lines

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""A text that begins with one of these is a formula to a spreadsheet."""


def csv_text(names: Sequence[str], rows: Sequence[Any], *, has_head: bool = True) -> str:
    """Rows as CSV; every cell is quoted, also for programs that separate cells by semicolons."""
    written = io.StringIO()
    writer = csv.writer(written, quoting=csv.QUOTE_ALL)
    if has_head:
        writer.writerow(names)
    writer.writerows([_text(getattr(row, name)) for name in names] for row in rows)
    return written.getvalue()


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    text = printable_lines("; ".join(_items(value)))
    return f"'{text}" if text.startswith(_FORMULA) else text


def _items(value: object) -> Iterator[str]:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        yield from (f"{name}: {each}" for name, each in value.items() if each is not None)
    elif isinstance(value, (list, tuple)):
        yield from (", ".join(_items(each)) for each in value)
    else:
        yield str(value)
