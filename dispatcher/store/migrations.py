"""Applies the numbered files of `sql/migrations/`. Migrations only go forward and are never edited.

Migrations name tables and functions without a schema; `migrate` sets the search_path to our schema. Sessions that call
a function later have a different search_path. So a function that reads tables either stores our search_path (`set
search_path from current`), or has a body that PostgreSQL parses when it creates the function (`begin atomic`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final

from psycopg import errors as pg

from dispatcher.errors import SchemaError
from dispatcher.store.connections import AsyncSession, Session, translated
from dispatcher.store.queries import query, schema
from dispatcher.store.statements import Row, fetch, fetch_sync

WEEKS_AHEAD: Final = 4
"""How many weekly partitions are created in advance. If these weeks have passed and no further partition was created,
new rows go to the default partition."""

_OF_SUPERUSERS: Final = "set dispatcher.prune_audit = 'on'\n"
"""A line of migration 0011 that only a superuser may execute. Migration 0018 recreates the function without this line.
"""
_FILE_NAME: Final = re.compile(r"(\d{4})_(\w+)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of `sql/migrations/`.

    Attributes:
        checksum: SHA-256 of the text, to detect an edited file.
    """

    number: int
    name: str
    text: str
    checksum: str


@cache
def all_migrations() -> tuple[Migration, ...]:
    """The migrations of this release, in order."""
    found = []
    for resource in files("dispatcher.sql.migrations").iterdir():
        if match := _FILE_NAME.fullmatch(resource.name):
            text = resource.read_text(encoding="utf-8")
            found.append(Migration(int(match[1]), match[2], text, sha256(text.encode()).hexdigest()))
    return tuple(sorted(found, key=lambda migration: migration.number))


def migrate(connection: Session) -> list[str]:
    """Applies the missing migrations and creates future partitions. Returns a description of each change.

    Idempotent. Runs in one transaction; concurrent calls wait for each other.

    Raises:
        SchemaError: The database's encoding is not UTF-8, the database is newer than this release, the file of an
            applied migration was edited, a different schema has our tables, another application has a table with the
            name of one of our tables, or the role lacks a right.
    """
    changes: list[str] = []
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    with translated(), connection.transaction():
        fetch_sync(connection, "lock_migrations")
        if not _has_tables(*fetch_sync(connection, "find_migration_table")[0]):
            with _explained("The first step"):
                if not fetch_sync(connection, "find_schema", {"schema": schema()}):
                    connection.execute(query("create_schema"))
                    changes.append(f"created schema {schema()}")
                connection.execute(query("create_migration_table"))
        applied = _assert_compatible(fetch_sync(connection, "list_migrations"))
        fetch_sync(connection, "enter_schema", {"schema": schema()})
        for migration in all_migrations():
            if migration.number not in applied:
                subject = f"{migration.number:04} {migration.name}"
                with _explained(f"Migration {subject}"):
                    connection.execute(migration.text.replace(_OF_SUPERUSERS, "").encode())
                row = {"number": migration.number, "name": migration.name, "checksum": migration.checksum}
                fetch_sync(connection, "record_migration", row)
                changes.append(f"applied migration {subject}")
        if made := fetch_sync(connection, "make_partitions", {"weeks_ahead": WEEKS_AHEAD}):
            changes.append(f"created {len(made)} {'partition' if len(made) == 1 else 'partitions'}")
    return changes


@contextmanager
def _explained(step: str) -> Iterator[None]:
    """Translates the block's errors about name conflicts or missing rights into a SchemaError with a remedy."""
    try:
        yield
    except (pg.DuplicateTable, pg.DuplicateFunction, pg.DuplicateObject) as error:
        raise SchemaError(
            f'{step} failed in the schema "{schema()}": {error.diag.message_primary}.',
            remedy="The existing object belongs to another application. Set DISPATCHER_DATABASE_SCHEMA to a schema "
            "that no other application uses.",
        ) from error
    except pg.InsufficientPrivilege as error:
        raise SchemaError(
            f'{step} failed in the schema "{schema()}": {error.diag.message_primary}.',
            remedy="Run `dispatcher init` as the owner of the tables. Before the first `init`, an administrator must "
            f'create the schema for that role: create schema "{schema()}" authorization ROLE; or, if the schema '
            f'exists: grant create on schema "{schema()}" to ROLE.',
        ) from error


def verify_schema(connection: Session) -> list[str]:
    """Asserts that exactly this release's migrations were applied. Returns the other schemas that also have our tables.

    Raises:
        SchemaError: No migration was applied, some are missing, the database is newer, or a migration was edited.
    """
    _assert_unicode(connection.info.parameter_status("server_encoding"))
    (found,) = fetch_sync(connection, "find_migration_table")
    _assert_complete(fetch_sync(connection, "list_migrations") if _has_tables(*found) else [])
    return list(found[1])


async def verify_schema_async(session: AsyncSession) -> None:
    """As `verify_schema`, on an asynchronous session."""
    (found,) = await fetch(session, "find_migration_table")
    _assert_complete(await fetch(session, "list_migrations") if _has_tables(*found) else [])


def _has_tables(has_tables: bool, others: Sequence[str]) -> bool:
    """Returns `has_tables`: whether our schema has the dispatcher's tables.

    Args:
        others: The other schemas of the database that have such tables.

    Raises:
        SchemaError: Our schema has no tables, but another schema has them. One relay publishes for the whole database,
            so emails in a second schema would never be published.
    """
    if others and not has_tables:
        raise SchemaError(
            f'The dispatcher\'s tables are not in the schema "{schema()}" but in the schema "{others[0]}".',
            remedy=f"Set DISPATCHER_DATABASE_SCHEMA={others[0]} here and for the applications that enqueue with the "
            'library, or move the tables (docs/deployment.md, "Schema and roles in PostgreSQL").',
        )
    return has_tables


def _assert_unicode(encoding: str | None) -> None:
    # An email or a provider's answer may contain any character, and only UTF8 can store every character.
    if encoding != "UTF8":
        raise SchemaError(
            f"The database's encoding is {encoding}, which cannot store every character.",
            remedy="Create a database with ENCODING 'UTF8', and set DISPATCHER_DATABASE_URL to it.",
        )


def _assert_complete(rows: Sequence[Row]) -> None:
    applied = _assert_compatible(rows)
    missing = [f"{m.number:04} {m.name}" for m in all_migrations() if m.number not in applied]
    if missing:
        raise SchemaError(
            f"The database lacks {len(missing)} "
            f"{'migration' if len(missing) == 1 else 'migrations'} of this release: {', '.join(missing)}.",
            remedy="Run `dispatcher init`.",
        )


def _assert_compatible(rows: Sequence[Row]) -> set[int]:
    """Returns the numbers of the applied migrations.

    Raises:
        SchemaError: This release does not have one of these migrations, or has a different text for it.
    """
    checksums = {migration.number: migration.checksum for migration in all_migrations()}
    for number, name, checksum in rows:
        if number not in checksums:
            raise SchemaError(
                f"The database has migration {number:04} {name}, which this release does not have.",
                remedy="Run the release that applied the migration, or a later one.",
            )
        if checksums[number] != checksum:
            raise SchemaError(
                f"Migration {number:04} {name} was edited after it was applied.",
                remedy="Restore the released file; make changes in a new migration.",
            )
    return {row[0] for row in rows}
