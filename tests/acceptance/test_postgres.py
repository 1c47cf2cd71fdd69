"""PostgreSQL sessions are terminated while workers send: results are kept, and nothing is sent again."""

from __future__ import annotations

import psycopg
import pytest

from tests.acceptance.harness import Host, emails, stop


def terminate_backends(host: Host) -> int:
    """Terminate every other session of the test's database; return the number of sessions."""
    statement = """
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
    """
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        return len(connection.execute(statement).fetchall())


@pytest.mark.slow
def test_repeatedly_cut_sessions_lose_and_repeat_nothing(host: Host) -> None:
    host.sink("--latency-ms", "5")
    ids = host.enqueue(emails(400))
    run = host.run()
    cut = 0

    for delivered in range(20, 340, 40):
        host.await_delivered(delivered)
        cut += terminate_backends(host)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 400}
    assert cut >= 10
    assert not run.events("process.exited", level="error")


def test_a_stop_while_sessions_are_cut_leaves_nothing_sending(host: Host) -> None:
    host.sink("--latency-ms", "5")
    ids = host.enqueue(emails(300))
    run = host.run()
    host.await_delivered(60)

    terminate_backends(host)
    stop(run, seconds=20)

    interrupted = host.books(ids)
    assert interrupted.count("sending") == interrupted.count("held") == 0, interrupted.counts
    second = host.run()
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 300}
