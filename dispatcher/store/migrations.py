"""The tables' versions: numbered files of `sql/migrations/`, applied forward only and never edited."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.errors import SchemaError
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import query

WEEKS_AHEAD: Final = 4
"""Partitions that are made ahead; a host that makes none for longer fills the default partition, and nothing fails."""

_FILE_NAME: Final = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of `sql/migrations/`.

    Attributes:
        checksum: SHA-256 of its text, by which an edited file is noticed.
    """

    number: int
    name: str
    text: str
    checksum: str


@cache
def all_migrations() -> tuple[Migration, ...]:
    """The migrations that this release has, in order."""
    found = []
    for resource in files("dispatcher.sql.migrations").iterdir():
        if match := _FILE_NAME.fullmatch(resource.name):
            text = resource.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), match[2], text, sha256(text.encode()).hexdigest()))
    return tuple(sorted(found, key=lambda migration: migration.number))


def migrate(connection: Connection[TupleRow]) -> list[str]:
    """Brings the database to this release and makes partitions ahead; returns what it changed, in words.

    A second call changes nothing; two at once wait for each other. All or nothing: one transaction.

    Raises:
        SchemaError: the database is not in UTF-8 or newer than this release, or an applied migration's file was edited.
    """
    changes: list[str] = []
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    with translated(), connection.transaction():
        connection.execute(query("lock_migrations"))
        connection.execute(query("create_migration_table"))
        applied = _applied(connection)
        _assert_compatible(applied)
        for migration in all_migrations():
            if migration.number not in applied:
                connection.execute(migration.text.encode())
                connection.execute(
                    query("record_migration"),
                    {"number": migration.number, "name": migration.name, "checksum": migration.checksum},
                )
                changes.append(f"applied migration {migration.number:04} {migration.name}")
        made = connection.execute(query("make_partitions"), {"weeks_ahead": WEEKS_AHEAD}).fetchall()
        if made:
            changes.append(f"made {len(made)} partitions")
    return changes


def verify_schema(connection: Connection[TupleRow]) -> None:
    """Asserts that the database is at this release.

    Raises:
        SchemaError: it was never migrated, is behind, is newer, or a migration was edited.
    """
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    with translated():
        row = connection.execute(query("find_migration_table")).fetchone()
        applied = _applied(connection) if row and row[0] else {}
    _assert_complete(applied)


async def verify_schema_async(session: AsyncSession) -> None:
    """The same on an asynchronous session."""
    with translated():
        row = await (await session.execute(query("find_migration_table"))).fetchone()
        rows = await (await session.execute(query("list_migrations"))).fetchall() if row and row[0] else []
    _assert_complete({number: (name, checksum) for number, name, checksum in rows})


def _assert_unicode(encoding: str | None) -> None:
    """An email, or a provider's answer, may hold any letter."""
    if encoding != "UTF8":
        raise SchemaError(
            f"The database's encoding is {encoding}, which cannot hold every letter.",
            remedy="Create one with ENCODING 'UTF8', and name it in DISPATCHER_DATABASE_URL.",
        )


def _assert_complete(applied: dict[int, tuple[str, str]]) -> None:
    _assert_compatible(applied)
    missing = [f"{m.number:04} {m.name}" for m in all_migrations() if m.number not in applied]
    if missing:
        raise SchemaError(
            f"The database lacks {len(missing)} of this release's migrations: {', '.join(missing)}.",
            remedy="Run `dispatcher init`.",
        )


def _applied(connection: Connection[TupleRow]) -> dict[int, tuple[str, str]]:
    return {number: (name, checksum) for number, name, checksum in connection.execute(query("list_migrations"))}


def _assert_compatible(applied: dict[int, tuple[str, str]]) -> None:
    known = {migration.number: migration for migration in all_migrations()}
    for number, (name, checksum) in applied.items():
        if number not in known:
            raise SchemaError(
                f"The database has migration {number:04} {name}, which this release does not know.",
                remedy="Run the release that applied it, or a later one.",
            )
        if known[number].checksum != checksum:
            raise SchemaError(
                f"Migration {number:04} {name} was edited after it was applied.",
                remedy="Restore the file as it was released; migrations go forward only.",
            )
