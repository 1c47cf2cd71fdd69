"""`dispatcher run` starts while a server is down, next to another run, or with invalid tables and queues."""

from __future__ import annotations

import asyncio
import re
import resource
import signal

import orjson
import psycopg

from dispatcher import enqueue
from dispatcher.cli.status import fetch_unready
from dispatcher.config.values import Listener
from dispatcher.dev.ports import choose
from tests.acceptance.harness import DISPATCHER, Host, emails, stop
from tests.supervisor.program import eventually


def test_emails_enqueued_before_the_start_are_sent(host: Host) -> None:
    before = host.enqueue(emails(200, name="before"))
    assert host.rabbit.waiting(host.topology.queue) == 0

    run = host.run()

    books = host.await_finished(before)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 200}


def test_emails_that_were_rolled_back_are_never_sent(host: Host) -> None:
    with psycopg.connect(host.database_url) as connection:
        for email in emails(20, name="rolled-back"):
            enqueue(connection, email)
        connection.rollback()
    kept = host.enqueue(emails(20, name="kept"))

    run = host.run()

    books = host.await_finished(kept)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 20}


def test_a_very_early_reload_ends_no_process(host: Host) -> None:
    run = host.run(AMQP_URL="amqp://nobody:secret@127.0.0.1:1/")
    run.await_events("broker.connection_lost")

    run.send(signal.SIGHUP)
    run.send(signal.SIGTERM)

    assert run.await_exit() == 0


def test_a_second_run_in_the_same_run_directory_is_refused_with_a_remedy(host: Host) -> None:
    run = host.run()
    run.await_events("relay.leading")

    second = host.run()

    assert second.await_exit() == 1
    (refused,) = second.events("startup.failed")
    assert refused["reason"] == f"Another `dispatcher run` uses the run directory {host.run_dir}."
    assert "DISPATCHER_RUN_DIR" in refused["remedy"]
    assert second.words == ""
    assert not second.events("process.started")
    stop(run)


def test_two_runs_with_separate_run_directories_share_the_work(host: Host) -> None:
    host.sink("--latency-ms", "10")
    runs = [host.run(WORKERS=1, RUN_DIR=host.folder / f"run-{number}") for number in range(2)]
    host.await_consumers()

    ids = host.enqueue(emails(600))

    books = host.await_finished(ids)
    for run in runs:
        run.await_events("email.attempted")
    leading, standing_by = sorted(runs, key=lambda run: -len(run.events("relay.leading")))
    assert not standing_by.events("relay.leading")
    stop(leading)
    standing_by.await_events("relay.leading")
    stop(standing_by)
    books.assert_balanced()
    assert books.counts == {"sent": 600}


def test_a_crash_loop_waits_longer_and_longer_and_stops_when_its_cause_is_fixed(host: Host) -> None:
    run = host.run(WORKERS=1)
    run.await_events("broker.connected")
    # The renamed table simulates a migration by a later release: this release cannot use the tables.
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        connection.execute("alter table email_log rename to email_log_gone")

    run.await_events("process.exited", 5, role="relay")

    waits = [event["retry_in_seconds"] for event in run.events("process.exited", role="relay")[:5]]
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert "The database does not have this release's tables in the schema" in run.words
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        connection.execute("alter table email_log_gone rename to email_log")
    ids = host.enqueue(emails(20))
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 20}


def test_a_worker_without_disk_space_reports_it_and_starts_once_there_is_space(host: Host) -> None:
    (port,) = choose(1)
    address = f"127.0.0.1:{port}"
    # Simulates a full disk: `ulimit` limits the size of each file that the host writes, and a worker's ledger needs
    # more.
    limited = ["sh", "-c", 'ulimit -S -f 128 && exec "$@"', "sh", *DISPATCHER, "run"]
    run = host.program(limited, "run", env=host.environment(METRICS="off", METRICS_ADDRESS=address, WORKERS=1))

    ended = run.await_events("process.exited", reason="could_not_boot")
    asked = eventually(lambda: asyncio.run(fetch_unready(Listener("127.0.0.1", port))), "a monitor that answers")
    status = host.command("status", "--json", METRICS_ADDRESS=address)
    assert status.await_exit() == 0

    reason = "The in-flight ledger cannot be created in the run directory: File too large. Free disk space"
    assert ended["error"].startswith(reason)
    for reason_text in (asked, orjson.loads(status.log)["unready"]):
        assert re.match(rf"worker 0 could not boot, (once|\d+ times in a row): {reason}", reason_text or "")
    assert "Traceback" not in run.words
    _, hard = resource.prlimit(run.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (hard, hard))
    host.await_finished(host.enqueue(emails(5)))
    stop(run)


def test_an_unusable_provider_uses_up_no_attempt_and_crashes_no_process(host: Host) -> None:
    host.folder.joinpath("mail").write_text("a file where the Maildir should be")
    ids = host.enqueue(emails(20))

    run = host.run()

    run.await_events("provider.paused", 2)
    assert not run.events("process.exited")
    host.folder.joinpath("mail").unlink()
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 20}
    assert {row.attempt_count for row in host.rows().values()} == {1}


def test_a_start_before_init_explains_what_to_do(host: Host) -> None:
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        connection.execute("drop table dispatcher_migration, email_log, email_idempotency, email_content cascade")
    host.rabbit.delete(host.topology.queue)

    run = host.run()

    assert run.await_exit() == 78
    refused = str(run.events("startup.failed"))
    assert "dispatcher init" in refused
    assert host.topology.queue in refused
    assert run.words == ""


def test_a_start_without_its_servers_waits_for_them_and_can_be_stopped(host: Host) -> None:
    run = host.run(DATABASE_URL="postgresql://nobody@127.0.0.1:1/nothing", AMQP_URL="amqp://127.0.0.1:1")

    run.await_events("store.connection_lost", 2)

    stop(run)  # the processes exit without being killed


def test_a_stop_right_after_the_start_leaves_nothing_behind(host: Host) -> None:
    ids = host.enqueue(emails(300))
    for moment in range(3):
        run = host.run()
        run.await_events("process.started", moment + 1)
        stop(run, seconds=20)

    run = host.run()

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 300}
    eventually(lambda: not list(host.run_dir.glob("*.new")))
