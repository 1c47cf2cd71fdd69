"""A process never waits long for a slow reader of its log, and counts lost lines."""

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

LINE = b"x" * 1023 + b"\n"


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
    """Writes until the pipe is full."""
    while not lines.add_dropped_count(None, "", {}):
        lines.write(LINE)


def drain(reading: int) -> bytes:
    """Reads all bytes in the pipe."""
    os.set_blocking(reading, False)
    content = b""
    with suppress(BlockingIOError):
        while octets := os.read(reading, 1 << 20):
            content += octets
    return content


def test_a_blocked_reader_costs_one_short_wait_and_then_nothing(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe
    lines = LogWriter(stream)
    fill(lines)

    began_at = time.monotonic()
    for _ in range(1000):
        lines.write(LINE)

    # If each of the 1,000 lines waited, this would take 50 seconds.
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


def test_other_processes_still_write_to_the_same_pipe_in_blocking_mode(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe

    LogWriter(stream)

    assert os.get_blocking(stream.fileno())


def test_a_closed_pipe_raises_nothing(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    os.close(reading)

    lines.write(LINE)


def test_a_socket_with_a_blocked_reader_does_not_delay() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.dup(ours.fileno()), "w") as stream:
        fill(LogWriter(stream))


def test_a_full_disk_raises_nothing() -> None:
    with Path("/dev/full").open("w") as stream:
        LogWriter(stream).write(LINE)


@pytest.mark.parametrize("form", ["json", "text"])
def test_the_log_continues_after_its_reader_was_blocked(pipe: tuple[int, TextIO], form: str) -> None:
    reading, stream = pipe
    log.configure("info", form, stream, worker="w0")
    for number in range(3 * fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ) // 1000):
        log.get_log().info("email.attempted", detail="z" * 1000, number=number)
    drain(reading)

    log.get_log().info("relay.leading")

    last = drain(reading).splitlines()[-1]
    assert b"relay.leading" in last
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
    assert without_time(quickly) == without_time(slowly)


def without_time(line: str) -> str:
    """A line without its timestamp."""
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", "<time>", line)


def test_the_quick_log_reports_lost_lines(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    for _ in range(3 * fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ) // 1000):
        quick_log.log.info("email.attempted", {"detail": "z" * 1000})
    drain(reading)

    quick_log.log.info("email.attempted", {})

    assert events(reading)[-1]["lines_dropped"] > 0


def test_buffered_lines_of_the_quick_log_are_written_whole_and_in_order(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    soon: list[Callable[[], None]] = []
    quick_log.log.buffer(soon.append)
    for number in range(100):
        quick_log.log.info("email.attempted", {"number": number, "detail": "z" * 100})
    assert drain(reading) == b""

    (flush,) = soon
    flush()

    assert [event["number"] for event in events(reading)] == list(range(100))


def test_a_written_piece_has_only_whole_lines_that_fit_into_a_pipe_at_once() -> None:
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the limits of each write
    with reading, os.fdopen(writing.detach(), "w") as stream:
        log.configure("info", "json", stream)
        quick_log.log.buffer(lambda _: None)
        for length in (10, 1000, 3000, 1000, 1000, 5000, 10):
            quick_log.log.info("email.attempted", {"detail": "z" * length})
        quick_log.log.flush()
        reading.setblocking(False)
        pieces = [reading.recv(1 << 16) for _ in range(5)]
        quick_log.log.write_to(None, {})

    lengths = [[len(orjson.loads(line)["detail"]) for line in piece.splitlines()] for piece in pieces]
    assert lengths == [[10, 1000], [3000], [1000, 1000], [5000], [10]]


def test_a_line_that_json_cannot_encode_is_escaped_and_affects_no_other_line(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    soon: list[Callable[[], None]] = []
    quick_log.log.buffer(soon.append)

    for detail in ("before", "\ud800", 2**64, "after"):
        quick_log.log.info("email.attempted", {"detail": detail})
    quick_log.log.buffer(None)
    quick_log.log.info("email.attempted", {"detail": "at once"})

    details = [event["detail"] for event in events(reading)]
    assert details == ["before", "'\\ud800'", "18446744073709551616", "after", "at once"]


def test_a_slow_reader_does_not_delay_every_line(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    fill(lines)

    began_at = time.monotonic()
    for _ in range(100):
        os.read(reading, 65536)
        for _ in range(100):  # more lines than the pipe has room for
            lines.write(LINE)

    # If each of the 100 rounds waited, this would take 5 seconds.
    assert time.monotonic() - began_at < 100 * MAX_WAIT_MS / 1000


def test_buffered_lines_report_lost_lines_once(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    soon: list[Callable[[], None]] = []
    quick_log.log.buffer(soon.append)
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


def events(reading: int) -> list[dict[str, Any]]:
    """The events in a JSON log."""
    return [orjson.loads(line) for line in drain(reading).splitlines()]


def test_many_lines_of_one_event_do_not_suppress_other_events(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)

    for _ in range(1000):
        log.get_log().warning("message.rejected")
        log.get_log().info("email.attempted")
    log.get_log().info("relay.leading")

    names = [event["event"] for event in events(reading)]
    assert names.count("message.rejected") == 100
    assert names.count("email.attempted") == 1000
    assert names[-1] == "relay.leading"
