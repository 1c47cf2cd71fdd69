"""A pause is in force in all worker processes within two seconds, survives a crash, and ends at `dispatcher resume`."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from tests.acceptance.harness import Host, emails, stop
from tests.supervisor.program import eventually

EMAILS = 600
LATEST_SECONDS = 2.0


def attempts(connection: psycopg.Connection, tenant: str) -> tuple[int, float]:
    """How many attempts a tenant's emails had, and how many seconds after the last pause began the last one started."""
    row = connection.execute(
        "select count(*),"
        " coalesce(extract(epoch from max(a.started_at) - (select max(began_at) from pause)), 0)::float8"
        " from every_attempt as a join email_log as e using (email_id) where e.tenant_id = %s",
        [tenant],
    ).fetchone()
    assert row is not None
    return row


@pytest.mark.slow
def test_a_paused_tenant_gets_no_attempt_after_two_seconds_nor_after_a_crash_and_loses_nothing(host: Host) -> None:
    host.sink()
    both = [replace(each, tenant_id=("acme", "other")[number % 2]) for number, each in enumerate(emails(EMAILS))]
    run = host.run(SMTP_MAX_PER_SECOND=50)
    host.await_consumers(2)
    ids = host.enqueue(both)
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        eventually(lambda: attempts(connection, "acme")[0] > 20, "attempts of the tenant")
        paused = host.command("pause", "tenant", "acme", "--reason", "complaints")
        assert paused.await_exit() == 0
        eventually(lambda: attempts(connection, "other")[1] > 2 * LATEST_SECONDS, "attempts of the other tenant")
        count, seconds = attempts(connection, "acme")
        assert count < EMAILS // 2
        assert seconds < LATEST_SECONDS
        run.destroy()
        run = host.run(SMTP_MAX_PER_SECOND=50)
        eventually(lambda: attempts(connection, "other")[0] >= EMAILS // 2, "all attempts of the other tenant")
        assert attempts(connection, "acme")[1] < LATEST_SECONDS
        assert host.command("resume", "tenant", "acme").await_exit() == 0

    books = host.await_finished(ids)

    assert books.counts.keys() <= {"sent", "held"}  # the crash interrupted some emails on the wire
    assert set(host.recipient.delivered().values()) == {1}
    stop(run)
