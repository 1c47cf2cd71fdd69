"""Applies the numbered files of `sql/migrations/`: forward only, never edited.

Migrations name tables and functions without a schema; `apply` sets the search_path to our schema. A function that reads
tables keeps that search_path (`set search_path from current`), or has a body that PostgreSQL parses when it creates the
function (`begin atomic`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

from psycopg import Connection
from psycopg import errors as pg
from psycopg.rows import TupleRow

from dispatcher.errors import SchemaError
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import query, schema

WEEKS_AHEAD: Final = 4
"""Partitions that are made ahead; a host that makes none for longer fills the default partition, and nothing fails."""

_OF_SUPERUSERS: Final = "set dispatcher.prune_audit = 'on'\n"
"""A line of migration 0011 that only a superuser may execute. Migration 0018 makes its function again without it."""
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
        SchemaError: the database is not in UTF-8 or newer than this release, an applied migration's file was edited,
            another schema has the tables, another application's table has the same name, or the role lacks a right.
    """
    changes: list[str] = []
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    with translated(), connection.transaction():
        connection.execute(query("lock_migrations"))
        if not _has_tables(connection.execute(query("find_migration_table")).fetchone()):
            changes += _begin(connection)
        applied = _applied(connection)
        _assert_compatible(applied)
        connection.execute(query("enter_schema"), {"schema": schema()})
        for migration in all_migrations():
            if migration.number not in applied:
                with _explained(f"Migration {migration.number:04} {migration.name}"):
                    connection.execute(migration.text.replace(_OF_SUPERUSERS, "").encode())
                connection.execute(
                    query("record_migration"),
                    {"number": migration.number, "name": migration.name, "checksum": migration.checksum},
                )
                changes.append(f"applied migration {migration.number:04} {migration.name}")
        made = connection.execute(query("make_partitions"), {"weeks_ahead": WEEKS_AHEAD}).fetchall()
        if made:
            changes.append(f"made {len(made)} partitions")
    return changes


def _begin(connection: Connection[TupleRow]) -> list[str]:
    """Makes the schema if there is none, and the table of applied migrations."""
    changes = []
    name = {"schema": schema()}
    with _explained("The first step"):
        if connection.execute(query("find_schema"), name).fetchone() is None:
            connection.execute(query("create_schema"))
            changes.append(f"made the schema {schema()}")
        connection.execute(query("create_migration_table"))
    return changes


@contextmanager
def _explained(step: str) -> Iterator[None]:
    """Translates the block's errors for names that are taken and missing rights into a SchemaError with a remedy."""
    try:
        yield
    except (pg.DuplicateTable, pg.DuplicateFunction, pg.DuplicateObject) as error:
        raise SchemaError(
            f'{step} fails in the schema "{schema()}": {error.diag.message_primary}.',
            remedy="It is another application's. Set DISPATCHER_DATABASE_SCHEMA to a schema that no application uses.",
        ) from error
    except pg.InsufficientPrivilege as error:
        raise SchemaError(
            f'{step} fails in the schema "{schema()}": {error.diag.message_primary}.',
            remedy="Run `dispatcher init` as the owner of the tables. Before the first `init`, an administrator makes "
            f'the schema for that role: create schema "{schema()}" authorization ROLE; or, if it exists: '
            f'grant create on schema "{schema()}" to ROLE.',
        ) from error


def verify_schema(connection: Connection[TupleRow]) -> list[str]:
    """Checks that the schema is at this release; returns other schemas that have a dispatcher's tables.

    Raises:
        SchemaError: it was never migrated, is behind, is newer, or a migration was edited.
    """
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    with translated():
        row = connection.execute(query("find_migration_table")).fetchone()
        applied = _applied(connection) if _has_tables(row) else {}
    _assert_complete(applied)
    return list(row[1]) if row else []


async def verify_schema_async(session: AsyncSession) -> None:
    """The same on an asynchronous session."""
    with translated():
        has_tables = _has_tables(await (await session.execute(query("find_migration_table"))).fetchone())
        rows = await (await session.execute(query("list_migrations"))).fetchall() if has_tables else []
    _assert_complete({number: (name, checksum) for number, name, checksum in rows})


def _has_tables(row: TupleRow | None) -> bool:
    """Whether our schema has the tables.

    Raises:
        SchemaError: it has not, but another schema of the database has. One relay publishes for a whole database, so
            emails in a second schema would wait for ever.
    """
    assert row is not None
    has_tables, others = row
    if others and not has_tables:
        raise SchemaError(
            f'The schema "{schema()}" has no tables of the dispatcher, but the schema "{others[0]}" has them.',
            remedy=f"Set DISPATCHER_DATABASE_SCHEMA={others[0]} here and for the applications that enqueue by the "
            'library, or move the tables (docs/deployment.md, "Schema and roles in PostgreSQL").',
        )
    return bool(has_tables)


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
