"""The log of what happens once per email: the lines that structlog would write, at a fifth of their cost.

It has no processors: nothing is bound, nothing limited, and an exception is a word like others.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import orjson
import structlog

from dispatcher.telemetry.lines import Lines

_FORM: Final = orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE


class QuickLog:
    """Writes JSON lines by itself once it has been told where; else it leaves everything to structlog."""

    def __init__(self) -> None:
        self._lines: Lines | None = None
        self._always: Mapping[str, Any] = {}
        self._soon: Callable[[Callable[[], None]], object] | None = None
        self._waiting: list[dict[str, Any]] = []

    def write_to(self, lines: Lines | None, always: Mapping[str, Any]) -> None:
        """Where lines go from now on; None: to structlog.

        Args:
            always: Fields of every event.
        """
        self.flush()
        self._lines = lines
        self._always = always
        self._soon = None

    def gather(self, soon: Callable[[Callable[[], None]], object] | None) -> None:
        """Writes lines together from now on, a few to a system call.

        Args:
            soon: Calls what it is given in a moment, as a loop's `call_soon` does; None: each line at once again, and
                what was gathered now, because the loop is gone.
        """
        self._soon = soon
        if soon is None:
            self.flush()

    def flush(self) -> None:
        """Writes what was gathered."""
        fields, self._waiting = self._waiting, []
        if fields:
            self._write(fields)

    def info(self, event: str, **fields: Any) -> None:
        """Logs an event; its fields may be UUIDs."""
        if self._lines is None:
            told = {name: str(value) if type(value) is UUID else value for name, value in fields.items()}
            structlog.get_logger().info(event, **told)
            return
        fields |= self._always
        fields["level"] = "info"
        fields["timestamp"] = datetime.now(UTC)
        fields["event"] = event
        if self._soon is None:
            self._write([fields])
            return
        if not self._waiting:
            self._soon(self.flush)
        self._waiting.append(fields)

    def _write(self, events: list[dict[str, Any]]) -> None:
        """Writes lines, as many at once as a pipe that others write to does not tear."""
        assert self._lines is not None
        piece, count = b"", 0
        for fields in events:
            line = _line(fields)
            if count and len(piece) + len(line) > select.PIPE_BUF:
                self._lines.write(piece, count)
                piece, count = b"", 0
            if not count and self._lines.lost:
                line = _line({**fields, "lines_dropped": self._lines.lost})
            piece += line
            count += 1
        self._lines.write(piece, count)


def _line(fields: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields, default=str, option=_FORM)
    except orjson.JSONEncodeError:  # half a letter, or a number beyond 64 bits
        return orjson.dumps({name: ascii(value) for name, value in fields.items()}, option=_FORM)


log: Final = QuickLog()
