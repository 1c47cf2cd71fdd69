"""A process never waits long for a slow reader of its log, and counts lost lines. An event has a limited number of
lines per time window."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from uuid import UUID

import orjson
import pytest
import structlog

from dispatcher.telemetry import log, quick_log
from dispatcher.telemetry.log_writer import MAX_WAIT_MS, LogWriter
from dispatcher.telemetry.storms import LINES_PER_WINDOW, WINDOW_SECONDS, CountedLine, StormLimit

LINE = b"x" * 1023 + b"\n"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The reading end of a pipe, and the writing end as a stream. Resets the log after the test."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
        quick_log.log.write_to(None, {})
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    with suppress(OSError):
        os.close(reading)


def fill(lines: LogWriter) -> None:
    while not lines.add_dropped_count(None, "", {}):
        lines.write(LINE)


def drain(reading: int) -> bytes:
    os.set_blocking(reading, False)
    content = b""
    with suppress(BlockingIOError):
        while octets := os.read(reading, 1 << 20):
            content += octets
    return content


@pytest.mark.parametrize("is_slow", [True, False], ids=["slow", "blocked"])
def test_a_slow_or_blocked_reader_costs_a_few_short_waits(pipe: tuple[int, TextIO], is_slow: bool) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    assert os.get_blocking(stream.fileno()), "other processes still write to the same pipe"
    fill(lines)

    began_at = time.monotonic()
    for _ in range(100):
        if is_slow:
            os.read(reading, 65536)
        for _ in range(100):  # more lines than the pipe has room for
            lines.write(LINE)

    # If each of the 100 rounds waited, this would take 5 seconds.
    assert time.monotonic() - began_at < 100 * MAX_WAIT_MS / 1000


def test_the_next_written_line_has_the_number_of_lost_lines(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    fill(lines)
    lines.write(LINE)
    lines.write(LINE)
    drain(reading)

    event = lines.add_dropped_count(None, "", {"event": "relay.leading"})
    lines.write(LINE)

    assert event == {"event": "relay.leading", "lines_dropped": 3}
    assert lines.add_dropped_count(None, "", {}) == {}


def test_a_partly_written_line_is_completed_before_the_next(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    capacity = fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ)
    long_line = b"y" * (capacity + 4096) + b"\n"

    lines.write(long_line)
    first = drain(reading)
    lines.write(LINE)

    assert first + drain(reading) == long_line + LINE


def test_a_closed_pipe_a_full_disk_and_a_socket_with_a_blocked_reader_raise_nothing(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    os.close(reading)
    LogWriter(stream).write(LINE)

    with Path("/dev/full").open("w") as full:
        LogWriter(full).write(LINE)

    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.dup(ours.fileno()), "w") as connected:
        fill(LogWriter(connected))


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_log_continues_after_its_reader_was_blocked(pipe: tuple[int, TextIO], form: str) -> None:
    reading, stream = pipe
    log.configure("info", form, stream, worker="w0")
    for _ in range(3 * fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ) // 1000):
        log.get_log().info("email.attempted", detail="z" * 1000)
    drain(reading)

    log.get_log().info("email.attempted", number=17)

    last = drain(reading).splitlines()[-1]
    assert b"number" in last
    assert b"lines_dropped" in last


@pytest.mark.parametrize("level", ["debug", "info", "warning"])
@pytest.mark.parametrize("form", ["json", "text"])
def test_the_quick_log_writes_the_same_lines_as_structlog(pipe: tuple[int, TextIO], form: str, level: str) -> None:
    reading, stream = pipe
    log.configure(level, form, stream, worker="w0")
    email_id = UUID(int=7)

    log.get_log().info("email.attempted", email_id=str(email_id), error_type=None, duration_ms=1.5)
    slowly = drain(reading).decode()
    quick_log.log.info("email.attempted", {"email_id": email_id, "error_type": None, "duration_ms": 1.5})
    quickly = drain(reading).decode()

    assert bool(quickly) is (level != "warning")
    assert TIME.sub("", quickly) == TIME.sub("", slowly)


def test_a_written_piece_has_only_whole_lines_that_fit_into_a_pipe_at_once() -> None:
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the limits of each write
    with reading, os.fdopen(writing.detach(), "w") as stream:
        soon = buffered(stream)
        for length in (10, 1000, 3000, 1000, 1000, 5000, 10):
            quick_log.log.info("email.attempted", {"detail": "z" * length})
        reading.setblocking(False)
        with pytest.raises(BlockingIOError):
            reading.recv(1)
        (flush,) = soon
        flush()
        pieces = [reading.recv(1 << 16) for _ in range(5)]
        quick_log.log.write_to(None, {})

    lengths = [[len(orjson.loads(line)["detail"]) for line in piece.splitlines()] for piece in pieces]
    assert lengths == [[10, 1000], [3000], [1000, 1000], [5000], [10]]


def test_a_line_that_json_cannot_encode_is_escaped_and_affects_no_other_line(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    buffered(stream)

    for detail in ("before", "\ud800", 2**64, "after"):
        quick_log.log.info("email.attempted", {"detail": detail})
    quick_log.log.buffer(None)
    quick_log.log.info("email.attempted", {"detail": "at once"})

    details = [event["detail"] for event in events(reading)]
    assert details == ["before", "'\\ud800'", "18446744073709551616", "after", "at once"]


def test_buffered_lines_report_lost_lines_once(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    buffered(stream)
    written = 3 * fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ) // 1000
    for _ in range(written):
        quick_log.log.info("email.attempted", {"detail": "z" * 1000})
    quick_log.log.flush()
    came = len(drain(reading).splitlines())

    for _ in range(20):
        quick_log.log.info("email.attempted", {"detail": "z" * 1000})
    quick_log.log.flush()

    counts = [event.get("lines_dropped") for event in events(reading)[-20:]]
    assert [count for count in counts if count] == [written - came]


def buffered(stream: TextIO) -> list[Callable[[], None]]:
    """Configures a quick log that buffers; returns the list of its calls that are due soon."""
    soon: list[Callable[[], None]] = []
    log.configure("info", "json", stream)
    quick_log.log.buffer(soon.append)
    return soon


def events(reading: int) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in drain(reading).splitlines()]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pass_on(limit: StormLimit, name: str) -> dict[str, Any] | None:
    try:
        return dict(limit(None, "info", {"event": name}))
    except structlog.DropEvent:
        return None


def test_a_window_has_a_limited_number_of_lines_of_an_event_and_the_next_begins_with_the_number_of_the_others() -> None:
    clock = Clock()
    limit = StormLimit(clock)

    passed = [pass_on(limit, "message.rejected") for _ in range(LINES_PER_WINDOW + 5)]

    assert passed.count(None) == 5
    assert pass_on(limit, "relay.leading") == {"event": "relay.leading"}
    for name in ("email.attempted", "email.recovered"):  # the log has a line for each of these
        assert None not in [pass_on(limit, name) for _ in range(10 * LINES_PER_WINDOW)]
    clock.now += WINDOW_SECONDS
    assert pass_on(limit, "message.rejected") == {"event": "message.rejected", "suppressed": 5}
    assert pass_on(limit, "message.rejected") == {"event": "message.rejected"}


def test_the_log_limits_the_lines_of_an_event(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)

    for _ in range(LINES_PER_WINDOW + 5):
        log.get_log().warning("message.rejected")
    log.get_log().info("relay.leading")

    names = [event["event"] for event in events(reading)]
    assert names == ["message.rejected"] * LINES_PER_WINDOW + ["relay.leading"]


def test_a_counted_line_is_due_once_per_period_with_the_count_since_the_previous_line() -> None:
    clock = Clock()
    line = CountedLine(30, clock)

    assert [line.due() for _ in range(4)] == [1, 0, 0, 0]
    clock.now = 30
    assert line.due(2) == 5
    assert line.due() == 0
    assert CountedLine(30, clock).due(0) == 0, "there is nothing to count"
