"""A row is stored in the partition for its id's week, or in the default partition until the week's partition exists."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from dispatcher.domain.email_id import lowest_id_at
from tests.store.books import Books
from tests.waiting import wait_until

FAR = datetime(2031, 5, 14, 12, tzinfo=UTC)
FAR_WEEK = "p20310512"
INSERTS = {
    "email_log": "(email_id, tenant_id, message_key) values (%s, 'default', 'far')",
    "email_content": "(email_id, sender, recipients, subject) values (%s, 'a@b.example', '{}', 'Far')",
    "email_attachment": "(email_id, position, filename, content_type, content) values (%s, 0, 'a.bin', 'a/b', 'x')",
    "email_attempt": """(email_id, attempt_number, worker, provider, started_at, finished_at, outcome)
        values (%s, 1, 'w', 'smtp', now(), now(), 'accepted')""",
    "email_event": "(email_id, event_key, provider, kind, happened_at) values (%s, '\\x00', 'ses', 'delivered', now())",
    "email_recipient": "(email_id, address_hash, domain) values (%s, '\\x00', 'b.example')",
}


def make(connection: psycopg.Connection, at: datetime, weeks_ahead: int = 0) -> list[str]:
    rows = connection.execute("select email_partitions_make(%s, %s)", [at, weeks_ahead]).fetchall()
    return [name for (name,) in rows]


def insert(connection: psycopg.Connection, email_id: UUID) -> None:
    for table, row in INSERTS.items():
        connection.execute(f"insert into {table} {row}".encode(), [email_id])


def place(connection: psycopg.Connection, table: str, email_id: UUID) -> str:
    where = sql.SQL("select tableoid::regclass::text from {} where email_id = %s").format(sql.Identifier(table))
    row = connection.execute(where, [email_id]).fetchone()
    assert row is not None
    return str(row[0])


@pytest.fixture
def books(connection: psycopg.Connection) -> Books:
    """A separate database, because the test creates partitions."""
    return Books(connection)


def test_a_partition_created_later_takes_its_rows_from_the_default_partition(connection: psycopg.Connection) -> None:
    monday = datetime(2031, 5, 12, tzinfo=UTC)
    first, last = lowest_id_at(monday), lowest_id_at(monday + timedelta(days=7, milliseconds=-1))
    before, after = lowest_id_at(monday - timedelta(milliseconds=1)), lowest_id_at(monday + timedelta(days=7))
    for email_id in (first, last, before, after):
        insert(connection, email_id)
        assert {place(connection, table, email_id) for table in INSERTS} == {f"{table}_default" for table in INSERTS}

    assert make(connection, FAR) == [f"{table}_{FAR_WEEK}" for table in INSERTS]

    for table in INSERTS:
        assert place(connection, table, first) == place(connection, table, last) == f"{table}_{FAR_WEEK}"
        assert place(connection, table, before) == place(connection, table, after) == f"{table}_default"
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(connection, first)
    assert len(make(connection, FAR, weeks_ahead=1)) == len(INSERTS)
    assert make(connection, FAR, weeks_ahead=1) == []


def test_creating_a_partition_waits_for_an_open_enqueue_and_moves_its_row(database_url: str, books: Books) -> None:
    email_id = lowest_id_at(FAR)
    with psycopg.connect(database_url) as application, ThreadPoolExecutor(1) as threads:
        insert(application, email_id)
        making = threads.submit(make, books.connection, FAR)
        with psycopg.connect(database_url, autocommit=True) as watcher:
            others = Books(watcher).other_sessions
            wait_until(lambda: any(row["wait_event_type"] == "Lock" for row in others()))

        application.commit()
        making.result(20)

    assert place(books.connection, "email_log", email_id) == f"email_log_{FAR_WEEK}"


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(microseconds=st.integers(0, 4_000_000_000_000_000))
def test_sql_and_domain_agree_on_the_lowest_id_of_an_instant(
    tables_session: psycopg.Connection, microseconds: int
) -> None:
    instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)

    row = tables_session.execute("select email_id_lowest_at(%s)", [instant]).fetchone()

    assert row == (lowest_id_at(instant),)
