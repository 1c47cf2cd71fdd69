"""Data to stdout, words to stderr; a reader of stdout that goes away ends the output, not the work."""

from __future__ import annotations

import os
import sys

import orjson

from dispatcher.domain.text import printable_lines
from dispatcher.errors import DispatcherError


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


def say(words: str) -> None:
    """Writes words to stderr without control characters. If stderr is closed, they are lost."""
    try:
        sys.stderr.write(f"{printable_lines(words)}\n")
        sys.stderr.flush()
    except OSError:
        pass


def unwritten(error: OSError) -> DispatcherError:
    """What is to be said of a stdout that takes nothing; from now on, whatever is written there goes nowhere."""
    _discard_stdout()
    return DispatcherError(f"The output cannot be written: {error.strerror}.")


def _discard_stdout() -> None:
    """What is buffered or comes later goes nowhere, so that the interpreter does not stumble over it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
