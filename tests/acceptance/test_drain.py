"""Enqueued emails are sent, each once, also by a dispatcher that is stopped half-way."""

from __future__ import annotations

import signal
import time

import pytest

from tests.acceptance.harness import Host, emails, stop


def test_everything_that_was_enqueued_is_sent_once(host: Host) -> None:
    ids = host.enqueue(emails(1000))
    run = host.run()

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 1000}
    assert host.rabbit.waiting(host.topology.queue) == 0
    assert list(host.run_dir.iterdir()) == [host.run_dir / "run.lock"]


def test_what_is_enqueued_while_it_runs_is_sent_at_once(host: Host) -> None:
    run = host.run()
    run.await_events("broker.connected", 2)
    run.await_events("relay.leading")
    began = time.monotonic()

    ids = host.enqueue(emails(1))
    host.await_finished(ids)

    assert time.monotonic() - began < 1.0
    stop(run)


def test_sigterm_in_the_middle_exits_in_time_and_the_next_run_finishes(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(600))
    run = host.run()
    host.await_delivered(150)

    began = time.monotonic()
    stop(run, seconds=20)

    drained_in = time.monotonic() - began
    interrupted = host.books(ids)
    assert drained_in < 5, "what is on the wire takes milliseconds"
    assert interrupted.count("sending") == 0
    assert interrupted.count("held") == 0
    assert 150 <= interrupted.count("sent") < 600
    assert interrupted.count("sent") + interrupted.count("pending") == 600
    assert not list(host.run_dir.glob("*.ledger"))
    second = host.run()
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 600}


def test_sigterm_to_every_process_at_once_is_a_drain_too(host: Host) -> None:
    # As systemd does it (KillMode=control-group), and `kill -TERM -PGID`.
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


@pytest.mark.slow
def test_five_thousand_and_five_thousand_more(host: Host) -> None:
    first = host.enqueue(emails(5000, name="first"))
    run = host.run()
    assert host.await_finished(first).counts == {"sent": 5000}
    second = host.enqueue(emails(5000, name="second"))
    host.await_delivered(6000)
    began = time.monotonic()
    stop(run, seconds=20)
    assert time.monotonic() - began < 20
    assert host.books(first | second).count("sending") == 0
    run = host.run()
    books = host.await_finished(first | second)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 10_000}
