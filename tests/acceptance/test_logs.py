"""A blocked or missing log reader does not affect emails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg

from dispatcher import enqueue
from tests.acceptance.harness import Host, emails, stop
from tests.supervisor.program import eventually


def test_a_blocked_log_reader_stops_no_email(host: Host, tmp_path: Path) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    stuck = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ids = host.enqueue(emails(4000))

    run = host.run(stdout=pipe)

    books = host.await_finished(ids, seconds=90)
    assert run.exit_code is None
    os.close(stuck)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 4000}


def test_a_closed_log_reader_stops_no_email_and_no_restart(host: Host, tmp_path: Path) -> None:
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    host.sink()
    run = host.run(WORKERS=1, stdout=pipe)
    first = host.enqueue(emails(50))
    host.await_finished(first)

    os.close(reading)
    second = host.enqueue(emails(50, name="unheard"))
    host.await_finished(second)
    # Kill all processes except the parent. So each of them starts again while no process reads the log pipe.
    for pid in (before := run.children()):
        run.send_to(pid, signal.SIGKILL)
    third = host.enqueue(emails(50, name="restarted"))
    books = host.await_finished(first | second | third)
    eventually(lambda: not set(before) & set(run.children()), "the exit of all killed processes")

    run.send(signal.SIGTERM)
    assert run.await_exit() == 0
    books.assert_balanced()
    assert books.counts == {"sent": 150}
    assert not run.words


def test_an_attempt_is_one_log_line_with_all_of_its_ids(host: Host) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    with psycopg.connect(host.database_url) as connection:
        (email,) = emails(1)
        email_id = enqueue(connection, email, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01").email_id

    run = host.run(WORKERS=1)

    event = run.await_events("email.attempted")
    stop(run)
    assert event["email_id"] == str(email_id)
    assert event["trace_id"] == trace_id
    assert event["correlation_id"] == "order-0"
    assert {"attempt", "provider", "outcome", "status", "error_type", "duration_ms", "worker"} <= event.keys()
