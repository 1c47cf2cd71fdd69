"""`dispatcher run` starts and stops at any moment, next to another run, and with faults of its host."""

from __future__ import annotations

import os
import signal
import socket

import psycopg

from tests.acceptance.harness import CONNECTIONS, Host, emails, stop
from tests.supervisor.program import Program, eventually


def test_a_stop_in_the_middle_ends_in_time_and_the_next_run_finishes(host: Host) -> None:
    # Sending takes six seconds, so each stop comes before the end even on a slow machine.
    sink = host.sink("--latency-ms", "200")
    ids = host.enqueue(emails(500))

    def interrupted() -> Program:
        run = host.run(DRAIN_SECONDS=60)
        host.await_delivered(len(sink.delivered()) + 30)
        return run

    def check(run: Program) -> None:
        # The drain may take a minute, but emails on the wire need only a fifth of a second.
        assert run.await_exit(30) == 0, run.log[-3000:]
        assert not run.members()
        books = host.books(ids)
        assert books.counts.keys() == {"sent", "pending"}
        assert sum(books.counts.values()) == 500

    run = interrupted()
    run.send(signal.SIGTERM)
    check(run)
    assert not list(host.run_dir.glob("*.ledger"))

    # systemd (KillMode=control-group) and `kill -TERM -PGID` send the signal to every process. This time, every session
    # of the dispatcher has just ended.
    run = interrupted()
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and backend_type = 'client backend'"
        )
    run.send_all(signal.SIGTERM)
    check(run)

    sink.become()
    last = host.run()
    books = host.await_finished(ids)
    stop(last)
    books.assert_balanced()
    assert books.counts == {"sent": 500}


def test_a_drain_does_not_wait_for_a_slow_provider_beyond_its_time_and_the_relay_stops_last(host: Host) -> None:
    host.sink("--latency-ms", "60000")
    ids = host.enqueue(emails(60))
    run = host.run(WORKERS=1, DRAIN_SECONDS=3)
    host.await_delivered(CONNECTIONS)  # accepted, but not answered yet

    stop(run)  # if a process drains too long, the parent kills it, and exits 1

    books = host.books(ids)
    books.assert_balanced()
    # Only in-flight emails are held; the worker releases emails that it had not started.
    assert books.counts == {"held": CONNECTIONS, "pending": 60 - CONNECTIONS}
    assert books.by_status["held"] == host.recipient.delivered().keys()
    # The relay stops after the worker, because it publishes the emails that the worker releases.
    assert run.events("process.exited")[0]["role"] == "worker 0"


def test_two_runs_with_separate_run_directories_share_the_work_and_one_takes_over_as_leader(host: Host) -> None:
    host.sink("--latency-ms", "10")
    runs = [host.run(WORKERS=1, RUN_DIR=host.folder / f"run-{number}") for number in range(2)]
    host.await_consumers()

    ids = host.enqueue(emails(200))

    books = host.await_finished(ids)
    for run in runs:
        run.await_events("email.attempted")
    leading, standing_by = sorted(runs, key=lambda run: -len(run.events("relay.leading")))
    assert not standing_by.events("relay.leading")
    stop(leading)
    standing_by.await_events("relay.leading")
    stop(standing_by)
    books.assert_balanced()
    assert books.counts == {"sent": 200}


def test_a_host_without_a_log_reader_metrics_folder_or_port_keeps_sending_and_restarting(host: Host) -> None:
    pipe = host.folder / "log"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    host.run_dir.mkdir(mode=0o700)
    (host.run_dir / "metrics").touch()
    host.sink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = host.run(WORKERS=1, stdout=pipe, METRICS_ADDRESS=f"127.0.0.1:{taken.getsockname()[1]}")
        ids = host.enqueue(emails(400, name="blocked"))  # their log lines fill the pipe twice
        host.await_finished(ids)
        assert run.exit_code is None

        os.close(reading)
        ids |= host.enqueue(emails(20, name="unheard"))
        host.await_finished(ids)
        # Kill all processes except the parent. So each of them starts again while no process reads the log pipe.
        for pid in (before := run.children()):
            run.send_to(pid, signal.SIGKILL)
        ids |= host.enqueue(emails(20, name="restarted"))
        books = host.await_finished(ids)
        eventually(lambda: not set(before) & set(run.children()), "the exit of all killed processes")
        run.send(signal.SIGTERM)
        assert run.await_exit() == 0
    books.assert_balanced()
    assert books.counts == {"sent": 440}
    assert not run.words
