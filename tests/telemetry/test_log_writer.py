"""The log's way out: whatever its reader does, nobody waits for it, and what got lost is counted."""

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
    """A pipe's reading end, and its writing end as a stream; no log goes there afterwards."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
        quick_log.log.write_to(None, {})
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    with suppress(OSError):
        os.close(reading)


def fill(lines: LogWriter) -> None:
    """Writes until nothing more goes in."""
    while not lines.add_dropped_count(None, "", {}):
        lines.write(LINE)


def drain(reading: int) -> bytes:
    """Everything that is in the pipe."""
    os.set_blocking(reading, False)
    content = b""
    with suppress(BlockingIOError):
        while octets := os.read(reading, 1 << 20):
            content += octets
    return content


def test_a_stuck_reader_costs_one_short_wait_and_then_nothing(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe
    lines = LogWriter(stream)
    fill(lines)

    began_at = time.monotonic()
    for _ in range(1000):
        lines.write(LINE)

    # A thousand waits would be fifty seconds.
    assert time.monotonic() - began_at < 100 * MAX_WAIT_MS / 1000


def test_what_was_lost_is_told_by_the_first_line_that_gets_through(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    fill(lines)
    lines.write(LINE)
    lines.write(LINE)
    drain(reading)

    told = lines.add_dropped_count(None, "", {"event": "relay.leading"})
    lines.write(LINE)

    assert told == {"event": "relay.leading", "lines_dropped": 3}
    assert lines.add_dropped_count(None, "", {}) == {}


def test_a_line_that_went_half_way_is_finished_before_the_next(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    capacity = fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ)
    long_line = b"y" * (capacity + 4096) + b"\n"

    lines.write(long_line)
    first = drain(reading)
    lines.write(LINE)

    assert first + drain(reading) == long_line + LINE


def test_others_who_write_to_the_same_pipe_still_wait_for_their_reader(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe

    LogWriter(stream)

    assert os.get_blocking(stream.fileno())


def test_a_reader_that_is_gone_is_no_fault(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    os.close(reading)

    lines.write(LINE)


def test_a_socket_whose_reader_is_stuck_delays_nobody() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.dup(ours.fileno()), "w") as stream:
        fill(LogWriter(stream))


def test_a_full_disk_is_no_fault() -> None:
    with Path("/dev/full").open("w") as stream:
        LogWriter(stream).write(LINE)


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_log_goes_on_after_its_reader_was_stuck(pipe: tuple[int, TextIO], form: str) -> None:
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
def test_the_quick_log_writes_what_the_other_does(pipe: tuple[int, TextIO], form: str, level: str) -> None:
    reading, stream = pipe
    log.configure(level, form, stream, worker="w0")
    email_id = UUID(int=7)

    log.get_log().info("email.attempted", email_id=str(email_id), error_type=None, duration_ms=1.5)
    slowly = drain(reading).decode()
    quick_log.log.info("email.attempted", email_id=email_id, error_type=None, duration_ms=1.5)
    quickly = drain(reading).decode()

    assert bool(quickly) is (level != "warning")
    assert without_time(quickly) == without_time(slowly)


def without_time(line: str) -> str:
    """A line, its instant left out."""
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", "<time>", line)


def test_the_quick_log_tells_what_got_lost(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    for _ in range(3 * fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ) // 1000):
        quick_log.log.info("email.attempted", detail="z" * 1000)
    drain(reading)

    quick_log.log.info("email.attempted")

    assert events(reading)[-1]["lines_dropped"] > 0


def test_gathered_lines_of_the_quick_log_come_in_order_and_untorn(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    soon: list[Callable[[], None]] = []
    quick_log.log.buffer(soon.append)
    for number in range(100):
        quick_log.log.info("email.attempted", number=number, detail="z" * 100)
    assert drain(reading) == b""

    (flush,) = soon
    flush()

    assert [event["number"] for event in events(reading)] == list(range(100))


def test_a_line_that_json_cannot_hold_is_told_as_it_can_and_takes_no_other_with_it(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    soon: list[Callable[[], None]] = []
    quick_log.log.buffer(soon.append)

    for detail in ("before", "\ud800", 2**64, "after"):
        quick_log.log.info("email.attempted", detail=detail)
    quick_log.log.buffer(None)
    quick_log.log.info("email.attempted", detail="at once")

    details = [event["detail"] for event in events(reading)]
    assert details == ["before", "'\\ud800'", "18446744073709551616", "after", "at once"]


def test_a_reader_that_is_slow_and_goes_on_is_not_waited_for_again_and_again(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    lines = LogWriter(stream)
    fill(lines)

    began_at = time.monotonic()
    for _ in range(100):
        os.read(reading, 65536)
        for _ in range(100):  # more than there is room for now
            lines.write(LINE)

    # A hundred waits would be five seconds.
    assert time.monotonic() - began_at < 100 * MAX_WAIT_MS / 1000


def test_gathered_lines_tell_what_got_lost_once(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    log.configure("info", "json", stream)
    soon: list[Callable[[], None]] = []
    quick_log.log.buffer(soon.append)
    written = 3 * fcntl.fcntl(stream.fileno(), fcntl.F_GETPIPE_SZ) // 1000
    for _ in range(written):
        quick_log.log.info("email.attempted", detail="z" * 1000)
    quick_log.log.flush()
    came = len(drain(reading).splitlines())

    for _ in range(20):
        quick_log.log.info("email.attempted", detail="z" * 1000)
    quick_log.log.flush()

    told = [event.get("lines_dropped") for event in events(reading)[-20:]]
    assert [count for count in told if count] == [written - came]


def events(reading: int) -> list[dict[str, Any]]:
    """What a JSON log says."""
    return [orjson.loads(line) for line in drain(reading).splitlines()]


def test_a_storm_of_one_event_leaves_room_for_the_others(pipe: tuple[int, TextIO]) -> None:
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
