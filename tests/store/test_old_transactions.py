"""What keeps PostgreSQL from removing old row versions is named, with what to do."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from dispatcher.cli.checks import CheckState, old_transaction_finding
from dispatcher.store.connections import connected
from dispatcher.store.old_transactions import OldTransaction, find_oldest_transaction

SINCE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_the_oldest_open_transaction_of_this_database_is_found(database_url: str) -> None:
    with (
        psycopg.connect(database_url, application_name="nightly-report") as report,
        psycopg.connect(database_url, application_name="younger") as younger,
        connected(database_url) as connection,
    ):
        for each in (report, younger):
            each.execute("set transaction isolation level repeatable read")
            each.execute("select 1")
            connection.execute("create table if not exists dispatcher.written as select pg_current_xact_id()")
            connection.execute("insert into dispatcher.written values (pg_current_xact_id())")

        found = find_oldest_transaction.sync(connection, older_seconds=0.0)

        assert found is not None
        assert (found.kind, found.name, found.application) == (
            "session",
            str(report.info.backend_pid),
            "nightly-report",
        )
        assert found.transactions >= 2
        assert find_oldest_transaction.sync(connection) is None  # it is not old enough to be reported


def test_without_an_open_transaction_nothing_is_found(database_url: str) -> None:
    with connected(database_url) as connection:
        assert find_oldest_transaction.sync(connection, older_seconds=0.0) is None
    assert old_transaction_finding(None).state is CheckState.OK


@pytest.mark.parametrize(
    ("old", "words", "remedy"),
    [
        (
            OldTransaction("session", "4711", "app", "psql", SINCE, 12_000),
            "user app, application psql, open since 2026-01-02 03:04:05 UTC, 12,000 transactions since",
            "select pg_terminate_backend(4711)",
        ),
        (
            OldTransaction("session", "4711", "other", "psql", None, 300_000),
            "the session 4711 (user other, application psql, 300,000 transactions since)",
            "select pg_terminate_backend(4711)",
        ),
        (
            OldTransaction("prepared transaction", "order-7", "app", None, SINCE, 5),
            "the prepared transaction order-7 (user app, open since 2026-01-02 03:04:05 UTC, 5 transactions since)",
            "rollback prepared 'order-7'",
        ),
        (
            OldTransaction("prepared transaction", "7'; drop table t; --", "app", None, SINCE, 5),
            "the prepared transaction 7'; drop table t; --",
            "rollback prepared '7''; drop table t; --'",
        ),
        (
            OldTransaction("replication slot", "standby_2", None, None, None, 300_000),
            "the replication slot standby_2 (300,000 transactions since)",
            "select pg_drop_replication_slot('standby_2')",
        ),
        (
            OldTransaction("standby", "standby_2", "repl", None, None, 300_000),
            "the standby standby_2 (user repl, 300,000 transactions since)",
            "hot_standby_feedback",
        ),
    ],
)
def test_each_kind_is_named_with_what_to_do(old: OldTransaction, words: str, remedy: str) -> None:
    finding = old_transaction_finding(old)

    assert finding.state is CheckState.WARNING
    assert words in finding.detail
    assert remedy in (finding.remedy or "")
