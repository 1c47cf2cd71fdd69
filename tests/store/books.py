"""Reads and writes the tables directly, without the dispatcher's code."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from dispatcher import Email, enqueue_many

Row = dict[str, Any]
UrlOf = Callable[[str], str]

NEXT_YEAR = datetime.now(UTC) + timedelta(days=365)

_numbers = itertools.count(1)


def email(key: str = "key-1", **fields: Any) -> Email:
    given = {"sender": "shop@example.com", "to": "ann@example.org", "subject": "Receipt", "text": "Thank you."}
    return Email(message_key=key, **{**given, **fields})


class Books:
    def __init__(self, connection: psycopg.Connection) -> None:
        """The connection must be in autocommit mode."""
        self.connection = connection

    def enqueue(self, count: int = 1, **fields: Any) -> list[UUID]:
        """Enqueues `count` emails with new keys; returns their ids in order."""
        answers = enqueue_many(self.connection, [email(f"key-{next(_numbers)}", **fields) for _ in range(count)])
        return [answer.email_id for answer in answers]

    def enqueue_one(self, **fields: Any) -> UUID:
        return self.enqueue(1, **fields)[0]

    def enqueue_tried(self, count: int = 1, **fields: Any) -> list[UUID]:
        """Enqueues emails that had an attempt of which nothing is recorded (see `lose_attempt`)."""
        email_ids = self.enqueue(count, **fields)
        self.lose_attempt(*email_ids)
        return email_ids

    def lose_attempt(self, *email_ids: UUID) -> None:
        """Counts an attempt of each email, as if its host were lost. So any provider may have accepted the email."""
        self.connection.execute(
            "update dispatcher.email_log set attempt_count = 1, lease_token = 1 where email_id = any(%s)",
            [list(email_ids)],
        )

    def key(self, email_id: UUID) -> str:
        return str(self.row(email_id)["message_key"])

    def keys(self, email_ids: list[UUID]) -> dict[UUID, str]:
        """The message key of each email by id, in the form that `LeaseStore.lease` takes."""
        return {row["email_id"]: row["message_key"] for row in self.rows() if row["email_id"] in email_ids}

    def row(self, email_id: UUID) -> Row:
        (row,) = self.select("select * from email_log where email_id = %s", email_id)
        return row

    def rows(self) -> list[Row]:
        """Every row of `email_log`, oldest first."""
        return self.select("select * from email_log order by email_id")

    def status(self, email_id: UUID) -> str:
        return str(self.row(email_id)["status"])

    def statuses(self) -> Counter[str]:
        rows = self.select("select status, count(*) from email_log group by status")
        return Counter({row["status"]: row["count"] for row in rows})

    def attempts(self, email_id: UUID) -> list[Row]:
        return self.select(
            "select * from every_attempt where email_id = %s order by attempt_number, started_at", email_id
        )

    def outcomes(self, email_id: UUID) -> list[str]:
        return [attempt["outcome"] for attempt in self.attempts(email_id)]

    def hourly(self) -> dict[str, int]:
        """The sum of `email_hourly` over all hours, providers and slots, by outcome."""
        found = self.select("select outcome, sum(email_count)::bigint as emails from email_hourly group by outcome")
        return {row["outcome"]: row["emails"] for row in found}

    def change(self, email_id: UUID, **columns: Any) -> None:
        """Sets columns of the email's row. An email whose status becomes `waiting` waits for a year by default."""
        if "status" in columns:
            columns.setdefault("wait_until", NEXT_YEAR if columns["status"] == "waiting" else None)
        names = [sql.SQL("{} = %s").format(sql.Identifier(name)) for name in columns]
        statement = sql.SQL("update email_log set {} where email_id = %s").format(sql.SQL(", ").join(names))
        self.connection.execute(statement, [*columns.values(), email_id])

    def lock(self, email_id: UUID) -> None:
        """Locks the email's row until this connection's transaction ends."""
        self.connection.execute("select from email_log where email_id = %s for update", [email_id])

    @contextlib.contextmanager
    def locked(self, *email_ids: UUID) -> Iterator[psycopg.Connection]:
        """Locks the emails' rows in another session, until the block ends or the session's transaction."""
        info = self.connection.info
        with psycopg.connect(make_conninfo(**info.get_parameters(), password=info.password)) as person:
            person.execute("select from email_log where email_id = any(%s) for update", [list(email_ids)])
            yield person

    def count(self, table: str) -> int:
        counted = sql.SQL("select count(*) as found from {}").format(sql.Identifier(table))
        with self.connection.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(counted).fetchone()
        assert row is not None
        return int(row["found"])

    def sessions(self, name: str) -> list[Row]:
        return self.select(
            "select * from pg_stat_activity where application_name = %s and datname = current_database()", name
        )

    def other_sessions(self) -> list[Row]:
        return self.select(
            "select * from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        )

    def waiting_for_a_lock(self, name: str) -> bool:
        return any(row["wait_event_type"] == "Lock" for row in self.sessions(name))

    def terminate(self, name: str, *, waiting: bool = False) -> int:
        """Terminates the sessions with this `application_name`; with `waiting`, only the sessions that wait for a lock.
        Returns the number of terminated sessions."""
        found = self.select(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = %s and datname = current_database() "
            "and (wait_event_type is not distinct from 'Lock' or not %s)",
            name,
            waiting,
        )
        return len(found)

    def select(self, statement: str, *values: Any) -> list[Row]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement.encode(), values).fetchall()


@contextlib.contextmanager
def frozen_sessions(books: Books, name: str) -> Iterator[None]:
    """Freezes PostgreSQL's processes for these sessions during the block. The sessions keep their locks, even if the
    client disconnects."""
    pids = [row["pid"] for row in books.sessions(name)]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
