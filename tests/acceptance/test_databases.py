"""PostgreSQL behind PgBouncer, or with a standby: what does not work is refused with a remedy."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from dispatcher import enqueue_many
from dispatcher.dev import cache, debian, ports, postgres
from dispatcher.dev.postgres import PostgresAccess
from dispatcher.dev.processes import Processes
from tests.acceptance.harness import CONNECTIONS, Host, emails, stop
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # downloads and starts servers


@contextmanager
def pgbouncer(folder: Path, database_url: str, *, mode: str) -> Iterator[str]:
    """Runs a pooler in this mode (`session`, `transaction`) during the block; yields the database's URL through the
    pooler."""
    root = cache.obtain("pgbouncer-debian", _fetch)
    parts = urlsplit(database_url)
    (port,) = ports.choose(1)
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n"
        f"pooled = host={parts.hostname} port={parts.port} dbname={parts.path[1:]}"
        f" user={parts.username} password={parts.password}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {mode}\ndefault_pool_size = 40\n"
    )
    configuration.chmod(0o644)
    libraries = ":".join(map(str, debian.library_folders(root)))
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [*postgres.unprivileged_prefix(), root / "usr/sbin/pgbouncer", configuration],
            env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": libraries},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: ports.accepts(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "pgbouncer.log").read_text()
        yield f"postgresql://somebody@127.0.0.1:{port}/pooled"
    finally:
        process.kill()
        process.wait()


def _fetch(folder: Path) -> None:
    debian.fetch("pgbouncer", folder, even_if_installed="pgbouncer", remedy="Install pgbouncer.", progress=print)


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


def test_transaction_pooling_is_refused_with_a_remedy_but_applications_may_use_it(host: Host, tmp_path: Path) -> None:
    host.sink()
    secret = tmp_path / "url"
    secret.write_text(host.database_url)
    run = host.run(DATABASE_URL="", DATABASE_URL_FILE=secret)
    host.await_finished(host.enqueue(emails(20, name="before")))

    with pgbouncer(tmp_path, host.database_url, mode="transaction") as url:
        for command, code in (("run", 78), ("api", 78), ("doctor", 1)):
            started = host.command(command, DATABASE_URL=url)
            assert started.await_exit() == code
            assert "PgBouncer in transaction mode" in started.log
            assert command == "doctor" or "pool_mode = session" in started.log
        # A reload with this URL stops no worker.
        secret.write_text(url)
        run.send(signal.SIGHUP)
        run.await_events("process.exited", 2, reason="could_not_boot")
        for number in range(3):  # the pool may use a different session each time
            with psycopg.connect(url, prepare_threshold=None) as connection:
                connection.execute("set local search_path = pg_catalog")
                enqueue_many(connection, emails(2, name=f"pooled-{number}"))
        books = host.await_finished(host.rows())
    stop(run)

    assert "PgBouncer in transaction mode" in run.log
    assert books.counts == {"sent": 26}
    assert not books.duplicates


@pytest.fixture
def pair() -> Iterator[tuple[PostgresAccess, PostgresAccess]]:
    with tempfile.TemporaryDirectory(prefix="dispatcher-standby-") as name:
        processes = Processes(Path(name))
        processes.spawn_keeper(os.getpid())
        try:
            primary, _ = postgres.start(processes, print, name="primary")
            standby, _ = postgres.start(processes, print, name="standby", primary=primary)
            yield primary, standby
        finally:
            processes.stop()


def test_doctor_names_a_standby_a_list_skips_it_and_a_start_waits_for_its_promotion(
    host: Host, pair: tuple[PostgresAccess, PostgresAccess]
) -> None:
    primary, standby = pair
    login, _, _ = primary.url.rpartition("@")
    both = f"{login}@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/{postgres.DATABASE}"
    assert host.command("init", DATABASE_URL=f"{both}?target_session_attrs=read-write").await_exit() == 0
    host.database_url = standby.url

    looked = host.command("doctor")
    assert looked.await_exit() == 1
    assert "PostgreSQL is a standby and takes no writes." in looked.log
    assert "target_session_attrs=read-write" in looked.log

    run = host.run()
    waiting = run.await_events("store.connection_lost")
    assert "is a standby" in waiting["reason"]
    assert not run.events("process.started")

    with psycopg.connect(standby.url, autocommit=True) as session:
        session.execute("select pg_promote()")
    ids = host.enqueue(emails(20))
    books = host.await_finished(ids)
    stop(run)
    assert books.counts == {"sent": 20}
