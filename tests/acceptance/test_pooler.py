"""With PgBouncer, session pooling works like a direct connection; transaction pooling is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest

from dispatcher import enqueue_many
from tests.acceptance.harness import CONNECTIONS, Host, emails, stop
from tests.acceptance.pooler import pgbouncer

pytestmark = pytest.mark.slow


def test_with_session_pooling_every_email_is_sent_once_despite_a_kill(host: Host, tmp_path: Path) -> None:
    host.sink("--latency-ms", "100")
    with pgbouncer(tmp_path, host.database_url, mode="session") as url:
        run = host.run(DATABASE_URL=url)
        host.await_consumers()
        ids = host.enqueue(emails(400))
        host.await_work(victim := run.pid_of("worker 0"))
        run.send_to(victim, signal.SIGKILL)

        run.await_events("ledger.settled")
        books = host.await_finished(ids)
        stop(run)

    books.assert_balanced()
    assert books.count("held") <= CONNECTIONS


@pytest.mark.parametrize("command", ["run", "api"])
def test_transaction_pooling_is_refused_at_start(host: Host, tmp_path: Path, command: str) -> None:
    with pgbouncer(tmp_path, host.database_url, mode="transaction") as url:
        started = host.command(command, DATABASE_URL=url)

        assert started.await_exit() == 78

    assert "PgBouncer in transaction mode" in started.log
    assert "pool_mode = session" in started.log


def test_a_reload_with_the_url_of_a_transaction_pooler_stops_no_worker(host: Host, tmp_path: Path) -> None:
    host.sink()
    secret = tmp_path / "url"
    secret.write_text(host.database_url)
    run = host.run(DATABASE_URL="", DATABASE_URL_FILE=secret)
    host.await_finished(host.enqueue(emails(20, name="before")))

    with pgbouncer(tmp_path, host.database_url, mode="transaction") as url:
        secret.write_text(url)
        run.send(signal.SIGHUP)
        run.await_events("process.exited", 2, reason="could_not_boot")
        books = host.await_finished(host.enqueue(emails(20, name="meanwhile")))
    stop(run)

    assert "PgBouncer in transaction mode" in run.log
    assert books.counts == {"sent": 20}
    assert not books.lost
    assert not books.duplicates


def test_doctor_names_transaction_pooling(host: Host, tmp_path: Path) -> None:
    with pgbouncer(tmp_path, host.database_url, mode="transaction") as url:
        looked = host.command("doctor", DATABASE_URL=url)

        assert looked.await_exit() == 1

    assert "PgBouncer in transaction mode" in looked.log


def test_an_application_can_enqueue_through_transaction_pooling(host: Host, tmp_path: Path) -> None:
    with pgbouncer(tmp_path, host.database_url, mode="transaction") as url:
        for number in range(3):  # the pool may use a different session each time
            with psycopg.connect(url, prepare_threshold=None) as connection:
                connection.execute("set local search_path = pg_catalog")
                enqueue_many(connection, emails(2, name=f"pooled-{number}"))

    assert len(host.rows()) == 6
