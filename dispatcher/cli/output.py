"""Writes data to stdout and messages to stderr. If the reader closes the pipe, the command continues silently."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import orjson

from dispatcher.domain.text import printable_lines
from dispatcher.errors import DispatcherError


def prepare_streams() -> None:
    """Makes stdout and stderr accept every text, in any locale. Replaces a stream that the caller has closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - open until the process exits
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def print_data(text: str) -> bool:
    """Writes lines to stdout; returns False if the reader closed the pipe. Any other reason is an error."""
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
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        raise unwritten(error) from error


def print_json(value: object) -> bool:
    """Writes a value as one line of JSON; returns False if the reader closed the pipe."""
    return print_data(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode())


def say(text: str) -> None:
    """Writes a message to stderr, without control characters. Does nothing if stderr is closed."""
    try:
        sys.stderr.write(f"{printable_lines(text)}\n")
        sys.stderr.flush()
    except OSError:
        pass


def counted(count: int, noun: str) -> str:
    """A count and its noun: "1 message", "2 messages", "1,000 messages"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def examples(ids: Iterable[object]) -> str:
    """Ids for the end of a message, one on each line, so that no terminal breaks an id in two."""
    return "".join(f"\n  {each}" for each in ids)


def unwritten(error: OSError) -> DispatcherError:
    """The error to raise when stdout cannot be written. Redirects stdout to /dev/null, so later writes do not fail."""
    _discard_stdout()
    return DispatcherError(f"stdout cannot be written: {error.strerror}.")


def _discard_stdout() -> None:
    """Redirects stdout to /dev/null. Otherwise the interpreter would fail at exit, when it flushes its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
