"""Writes log lines to a file, a terminal, a socket, or a pipe whose reader may be slow, blocked or closed.

A process never waits long for its log. If the reader does not keep up, the writer waits at most `MAX_WAIT_MS`, and at
most once per `WAIT_INTERVAL_SECONDS`. Then the writer drops lines and counts them. The next line that it can write has
the count in the field `lines_dropped`.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TextIO

from structlog.typing import EventDict

MAX_WAIT_MS: Final = 50
WAIT_INTERVAL_SECONDS: Final = 1.0
"""The shortest time between two waits. Without this limit, every line would wait for a slow reader."""
PIPE_BYTES: Final = 1024 * 1024
"""The size that the writer sets for a pipe. Such a pipe holds the lines that a busy worker logs in a few seconds. Linux
allows this size for every user (pipe-max-size)."""

Write = Callable[[bytes], int]
"""Writes as many bytes as the reader accepts without waiting, and returns their number; raises BlockingIOError if the
number is zero."""


class LogWriter:
    """A log file whose `write` never raises and never waits for long."""

    def __init__(self, stream: TextIO) -> None:
        """Uses only the stream's file descriptor: otherwise, Python would repeat a failed write of the stream's buffer
        when the process exits, and the exit would fail."""
        stream.flush()
        self._descriptor = stream.fileno()
        self._write = _writer(self._descriptor)
        self._lost = 0
        self._rest = b""  # the part of a line that is not written yet
        self._may_wait_at = 0.0

    def write(self, line: bytes, count: int = 1) -> None:
        """Writes `line`, which contains `count` log lines. If the reader accepts nothing, counts them as lost."""
        if self._rest:
            self._rest = self._put(self._rest)
        if self._rest:
            self._lost += count
            return
        rest = self._put(line)
        if rest == line:
            self._lost += count
        else:
            self._lost, self._rest = 0, rest

    @property
    def lost(self) -> int:
        """The number of lines lost since the last written line."""
        return self._lost

    def add_dropped_count(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        """A structlog processor: adds the number of lines lost before this event."""
        if self._lost:
            event["lines_dropped"] = self._lost
        return event

    def flush(self) -> None:
        """Does nothing: no line is buffered."""

    def _put(self, octets: bytes) -> bytes:
        """Writes as many bytes as the reader accepts, and returns the remaining bytes."""
        while octets:
            try:
                octets = octets[self._write(octets) :]
            except BlockingIOError:
                if not self._becomes_writable():
                    return octets
            except OSError:
                # The disk is full or the reader has closed the pipe. Lines are lost, but emails are sent.
                return b""
        return b""

    def _becomes_writable(self) -> bool:
        """Whether the reader accepts more bytes now, or after a short wait if a wait is allowed."""
        may_wait = not self._lost and time.monotonic() >= self._may_wait_at
        poll, is_writable = select.poll(), False
        poll.register(self._descriptor, select.POLLOUT)
        with suppress(OSError):
            is_writable = bool(poll.poll(MAX_WAIT_MS if may_wait else 0))
        if may_wait:
            self._may_wait_at = time.monotonic() + WAIT_INTERVAL_SECONDS
        return is_writable


def _writer(descriptor: int) -> Write:
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(kind):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    if not stat.S_ISREG(kind):
        try:
            # Other processes that use the pipe or terminal still block.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:  # a socket, or another user's pipe: then all processes that share it no longer block
            os.set_blocking(descriptor, False)
    return lambda octets: os.write(descriptor, octets)
