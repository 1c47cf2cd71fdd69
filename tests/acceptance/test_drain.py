"""Enqueued emails are sent exactly once, even if the dispatcher is stopped while it sends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import orjson
import psycopg
import pytest

from tests.acceptance.harness import CONNECTIONS, Host, emails, stop


def test_everything_that_was_enqueued_is_sent_once(host: Host) -> None:
    ids = host.enqueue(emails(1000))
    run = host.run()

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 1000}
    assert host.rabbit.waiting(host.topology.queue) == 0
    assert {path.name for path in host.run_dir.iterdir()} == {"run.lock", "metrics"}


def test_emails_enqueued_during_a_run_are_sent_at_once(host: Host) -> None:
    run = host.run()
    host.await_consumers()
    run.await_events("relay.leading")

    for number in range(5):
        host.await_finished(host.enqueue(emails(1, name=f"email {number}")))

    # The test uses the median, because the machine may stall briefly. All times are by PostgreSQL's clock.
    with psycopg.connect(host.database_url) as connection:
        took = connection.execute("select extract(epoch from sent_at - created_at) from email_log").fetchall()
    assert sorted(took)[2] < (1.0,)
    stop(run)


def test_sigterm_in_the_middle_exits_in_time_and_the_next_run_finishes(host: Host) -> None:
    # Sending takes ten seconds, so the stop comes before the end even on a slow machine.
    sink = host.sink("--latency-ms", "200")
    ids = host.enqueue(emails(800))
    run = host.run(DRAIN_SECONDS=60)
    host.await_delivered(50)

    began = time.monotonic()
    stop(run, seconds=20)

    drained_in = time.monotonic() - began
    interrupted = host.books(ids)
    assert drained_in < 10, "emails on the wire need only a fifth of a second"
    assert interrupted.count("sending") == 0
    assert interrupted.count("held") == 0
    assert 50 <= interrupted.count("sent") < 800
    assert interrupted.count("sent") + interrupted.count("pending") == 800
    assert not list(host.run_dir.glob("*.ledger"))
    sink.become()
    second = host.run()
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 800}


def test_sigterm_to_every_process_at_once_also_drains(host: Host) -> None:
    # systemd (KillMode=control-group) and `kill -TERM -PGID` also send the signal to every process.
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(400))
    run = host.run()
    host.await_delivered(100)

    run.send_all(signal.SIGTERM)

    assert run.await_exit(20) == 0
    interrupted = host.books(ids)
    assert interrupted.count("sending") == interrupted.count("held") == 0
    second = host.run()
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 400}


def test_a_drain_does_not_wait_for_a_slow_provider_beyond_its_time(host: Host) -> None:
    host.sink("--latency-ms", "60000")
    ids = host.enqueue(emails(60))
    run = host.run(WORKERS=1, DRAIN_SECONDS=1)
    host.await_delivered(CONNECTIONS)  # accepted, but not answered yet

    stop(run)  # if a process drains too long, the parent kills it, and exits 1

    books = host.books(ids)
    books.assert_balanced()
    # Only in-flight emails are held; the worker releases emails that it had not started.
    assert books.counts == {"held": CONNECTIONS, "pending": 60 - CONNECTIONS}
    assert books.by_status["held"] == host.recipient.delivered().keys()


def test_an_unwritable_log_stops_no_email(host: Host) -> None:
    host.sink()
    good = host.enqueue(emails(100))
    refused = host.enqueue(emails(5, name="refused", to=lambda number: f"refused-{number}@example.org"))
    run = host.run(stdout=Path("/dev/full"))

    books = host.await_finished(good | refused)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 100, "failed": 5}


@pytest.mark.slow
def test_twice_five_thousand_emails_from_files_are_sent(host: Host) -> None:
    enqueue_file(host, "first")
    run = host.run()
    first = host.await_finished(host.rows(), seconds=60)
    assert first.counts == {"sent": 5000}
    enqueue_file(host, "second")
    ids = set(host.rows())
    host.await_delivered(6000)

    began = time.monotonic()
    stop(run, seconds=20)

    assert time.monotonic() - began < 20
    interrupted = host.books(ids)
    assert interrupted.count("sending") == interrupted.count("held") == 0
    assert interrupted.count("pending") > 0
    second = host.run()
    books = host.await_finished(ids, seconds=60)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 10_000}


def enqueue_file(host: Host, name: str) -> None:
    """Enqueue five thousand emails with `dispatcher enqueue --file`."""
    file = host.folder / f"{name}.jsonl"
    file.write_bytes(b"\n".join(orjson.dumps(email.to_json()) for email in emails(5000, name=name)))
    enqueue = host.command("enqueue", "--file", str(file))
    assert enqueue.await_exit() == 0, enqueue.words
