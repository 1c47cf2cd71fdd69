"""Data to stdout, words to stderr; a reader of stdout that goes away ends the output, not the work."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO

import orjson

from dispatcher.domain.text import printable_lines
from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_WITHOUT_WRAPPING: Final = 1000
"""Columns of a table that no terminal shows: another program reads it, line by line."""


def prepare_streams() -> None:
    """Makes stdout and stderr fit for any text, whatever the locale, and even where they were closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the process's life
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def print_data(text: str) -> bool:
    """Writes lines to stdout; returns whether somebody still reads there.

    Raises:
        DispatcherError: they cannot be written for another reason, such as a full disk.
    """
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return False
    except OSError as error:
        raise unwritten(error) from error
    return True


def flush_data() -> None:
    """Writes what is still on its way to stdout; whether somebody reads there is nothing to us.

    Raises:
        DispatcherError: it cannot be written for another reason, such as a full disk.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        raise unwritten(error) from error


def print_json(value: object) -> bool:
    """Writes a value as one line of JSON; returns whether somebody still reads."""
    return print_data(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode())


def print_table(table: RenderableType) -> bool:
    """Writes a table, coloured where that is wanted; returns whether anybody reads. Raises as `print_data` does."""
    console = console_for(sys.stdout)
    try:
        with console.capture() as captured:
            console.print(table)
    except OSError as error:  # Rich writes nothing to stdout then, and a full disk does not take even that.
        raise unwritten(error) from error
    return print_data("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def say(words: str) -> None:
    """Writes words to stderr without control characters. If stderr is closed, they are lost."""
    try:
        sys.stderr.write(f"{printable_lines(words)}\n")
        sys.stderr.flush()
    except OSError:
        pass


def console_for(stream: TextIO) -> Console:
    """A console that honours NO_COLOR and TERM, and wraps lines only on a terminal."""
    from rich.console import Console

    # Rich takes NO_COLOR by its letter and keeps bold and dim; who sets it wants plain text.
    plain = bool(os.environ.get("NO_COLOR")) or not stream.isatty()
    width = None if stream.isatty() else _WITHOUT_WRAPPING
    return Console(file=stream, highlight=False, color_system=None if plain else "auto", width=width)


def plain_table(*columns: str, **options: Any) -> Table:
    """A table for people: a heading, a rule, no frame."""
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, **options)


def unwritten(error: OSError) -> DispatcherError:
    """What is to be said of a stdout that takes nothing; from now on, whatever is written there goes nowhere."""
    _discard_stdout()
    return DispatcherError(f"The output cannot be written: {error.strerror}.")


def _discard_stdout() -> None:
    """What is buffered or comes later goes nowhere, so that the interpreter does not stumble over it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
