"""Where log lines go: a file, a terminal, a socket, or a pipe whose reader may be slow, stuck or gone.

Sending never waits for a log. A line that finds its reader stuck or slow waits for it a moment, once in a while; else
lines are dropped and counted, until one gets through again: it carries the count, as `lines_dropped`.
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

PATIENCE_MS: Final = 50
IMPATIENT_SECONDS: Final = 1.0
"""From one wait to the next: a reader that is slow and goes on would else have every line wait for it."""
PIPE_BYTES: Final = 1024 * 1024
"""Some seconds of a busy worker's lines; Linux lets everybody have so much (pipe-max-size)."""

Write = Callable[[bytes], int]
"""Writes what it can at once and returns how much; raises BlockingIOError where that is nothing."""


class Lines:
    """Takes whole lines, never raises, and never waits for long."""

    def __init__(self, stream: TextIO) -> None:
        """
        Args:
            stream: Used past its buffer: what a buffer could not write it would try again at the end of the process,
                and fail that.
        """
        stream.flush()
        self._descriptor = stream.fileno()
        self._write = _writer(self._descriptor)
        self._lost = 0
        self._rest = b""  # of a line that its reader took a part of
        self._patient_at = 0.0

    def write(self, line: bytes, count: int = 1) -> None:
        """Writes one line, or several at once, or counts them as lost."""
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
        """How many lines were lost since the last one that was not."""
        return self._lost

    def tell_lost(self, _logger: Any, _method: str, event: EventDict) -> EventDict:
        """A structlog processor: the event says how many lines before it were lost."""
        if self._lost:
            event["lines_dropped"] = self._lost
        return event

    def flush(self) -> None:
        """There is nothing to flush."""

    def _put(self, octets: bytes) -> bytes:
        """Writes as much as goes, and returns the rest."""
        while octets:
            try:
                octets = octets[self._write(octets) :]
            except BlockingIOError:
                if not self._becomes_writable():
                    return octets
            except OSError:
                # The disk is full, or the reader gone: lines get lost, and not emails.
                return b""
        return b""

    def _becomes_writable(self) -> bool:
        """Whether its reader makes room, within a moment if one may be waited for."""
        is_patient = not self._lost and time.monotonic() >= self._patient_at
        is_writable = _is_writable(self._descriptor, PATIENCE_MS if is_patient else 0)
        if is_patient:
            self._patient_at = time.monotonic() + IMPATIENT_SECONDS
        return is_writable


def _writer(descriptor: int) -> Write:
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(kind):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    if not stat.S_ISREG(kind):
        descriptor = _opened_again(descriptor)
    return lambda octets: os.write(descriptor, octets)


def _opened_again(descriptor: int) -> int:
    """The same pipe or terminal, opened so that writing never waits; others who have it open notice nothing.

    Where that cannot be done, as with a socket, or a pipe that another user made, the mode is set for all who share it.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        os.set_blocking(descriptor, False)
        return descriptor


def _is_writable(descriptor: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    with suppress(OSError):
        return bool(poll.poll(milliseconds))
    return False
