"""Measures PostgreSQL's work per email: statements and WAL.

pg_stat_statements counts the statements. Private servers load this extension; without it, there is no figure. The WAL
is the WAL of the whole server, including full-page images after checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

from dispatcher.dev import postgres

PRELOAD: Final = {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "top"}
TOP: Final = 8


@dataclass(frozen=True, slots=True)
class Statement:
    """One of the most expensive statements.

    Attributes:
        text: The beginning of the statement.
        calls: The number of calls per email. All figures are per email.
    """

    text: str
    calls: float
    rows: float
    execution_us: float
    wal_bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """PostgreSQL's work per email.

    Attributes:
        statements: The number of statements, including BEGIN and COMMIT; None without pg_stat_statements.
        top: The most expensive statements, descending.
    """

    wal_bytes: float
    statements: float | None
    execution_us: float | None
    top: tuple[Statement, ...]


class WorkMeter:
    """Counts PostgreSQL's work from the creation of this object on."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        """
        Args:
            connection: A connection to the case's database, in autocommit mode.
        """
        self._connection = connection
        self._counts_statements = _can_count(connection)
        if self._counts_statements:
            connection.execute(
                "select pg_stat_statements_reset(0, (select oid from pg_database where datname = current_database()))"
            )
        self._began_at = _wal_position(connection)

    def read(self, emails: int) -> Work:
        """The work per email since this object was created."""
        wal_bytes = (_wal_position(self._connection) - self._began_at) / emails
        if not self._counts_statements:
            return Work(wal_bytes, None, None, ())
        rows = self._connection.execute(
            "select regexp_replace(query, '\\s+', ' ', 'g'), calls, rows, total_exec_time * 1000, wal_bytes::float8"
            " from pg_stat_statements where dbid = (select oid from pg_database where datname = current_database())"
            " order by total_exec_time desc"
        ).fetchall()
        top = [
            Statement(text[:80], calls / emails, count / emails, microseconds / emails, octets / emails)
            for text, calls, count, microseconds, octets in rows
        ]
        return Work(
            wal_bytes, sum(each.calls for each in top), sum(each.execution_us for each in top), tuple(top[:TOP])
        )


def preload_settings() -> dict[str, str]:
    """The settings that load pg_stat_statements into a private PostgreSQL; empty if the extension is not installed."""
    binaries = postgres.find(lambda _: None)
    parent = binaries.folder.parent
    places = [parent / "share/extension", parent / "share/postgresql/extension"]
    places.append(Path("/usr/share/postgresql") / str(binaries.version) / "extension")
    has_it = any((place / "pg_stat_statements.control").exists() for place in places)
    return dict(PRELOAD) if has_it else {}


def _can_count(connection: psycopg.Connection[Any]) -> bool:
    loaded = connection.execute("select current_setting('shared_preload_libraries')").fetchone()
    if loaded is None or "pg_stat_statements" not in loaded[0]:
        return False
    try:
        connection.execute("create extension if not exists pg_stat_statements")
    except psycopg.errors.InsufficientPrivilege:
        return False  # a given server whose role may not create extensions
    return True


def _wal_position(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint").fetchone()
    assert row is not None
    return int(row[0])
