"""If only a standby answers, `doctor` reports it, and `dispatcher run` waits for the standby's promotion."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from dispatcher.dev import postgres
from dispatcher.dev.postgres import PostgresAccess
from dispatcher.dev.processes import Processes
from tests.acceptance.harness import Host, emails, stop

pytestmark = pytest.mark.slow


@pytest.fixture
def pair() -> Iterator[tuple[PostgresAccess, PostgresAccess]]:
    """A primary and its standby, for this test only."""
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
