"""A commit that waits for a synchronous standby keeps its rows locked. The dispatcher reports these rows as waiting for
a commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from dispatcher.store.leases import LeaseStore
from dispatcher.store.migrations import migrate
from tests.store.books import Books
from tests.waiting import wait_until


@pytest.fixture
def own_database_url(tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A PostgreSQL server for this test alone, because commits on it will wait."""
    monkeypatch.delenv("DISPATCHER_DATABASE_URL", raising=False)
    monkeypatch.setenv("DISPATCHER_AMQP_URL", servers.amqp_url)
    monkeypatch.setenv("DISPATCHER_RABBITMQ_MANAGEMENT_URL", servers.management_url)
    with private_servers(tmp_path) as own:
        yield own.database_url


@contextmanager
def missing_standby(connection: psycopg.Connection) -> Iterator[None]:
    """During the block, commits of other sessions wait for a missing standby."""
    connection.execute("set synchronous_commit = local")
    for command in ("alter system set synchronous_standby_names = 'away'", "select pg_reload_conf()"):
        connection.execute(command.encode())
    wait_until(lambda: connection.execute("show synchronous_standby_names").fetchone() == ("away",))
    try:
        yield
    finally:
        for command in ("alter system reset synchronous_standby_names", "select pg_reload_conf()"):
            connection.execute(command.encode())


async def test_rows_locked_by_a_commit_that_waits_for_a_standby_are_reported_as_such(
    own_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(own_database_url, autocommit=True) as connection:
        migrate(connection)
        books = Books(connection)
        email_id = books.enqueue_one()
        pool = make_pool(own_database_url, name="test", size=1, lock_seconds=0.1)
        await pool.open()
        store = LeaseStore(pool, worker="worker-1", slot="slot-1")

        def record() -> None:
            with psycopg.connect(own_database_url, application_name="worker-2", autocommit=True) as session:
                session.execute("update email_log set tenant_id = tenant_id")

        worker = threading.Thread(target=record)
        with missing_standby(connection):
            worker.start()
            waiting = (
                "select from pg_stat_activity where application_name = 'worker-2' and wait_event = 'SyncRep' "
                f"and xact_start < clock_timestamp() - {BATCH_LOCK_SECONDS} * interval '1 second'"
            )
            wait_until(lambda: connection.execute(waiting.encode()).fetchone() is not None)
            locked = await store.locked.find_locked([email_id], is_busy=True)
        worker.join()
        await pool.close()

    assert locked == {email_id}
    told = capsys.readouterr().out
    assert "store.commits_waiting" in told
    assert "email.locked" not in told
    assert "waiting for a synchronous standby to confirm its commit" in told
