"""Creates the tables of an earlier release."""

from __future__ import annotations

import psycopg

from dispatcher.store.migrations import all_migrations
from dispatcher.store.queries import query


def create_tables(database_url: str, *, before: int) -> None:
    """Applies the migrations with a lower number than `before` to an empty database, and creates partitions."""
    with psycopg.connect(database_url) as connection:
        connection.execute("create schema dispatcher")
        connection.execute("set search_path = dispatcher, pg_temp")
        connection.execute(query("create_migration_table"))
        for migration in (each for each in all_migrations() if each.number < before):
            connection.execute(migration.text.encode())
            row = {"number": migration.number, "name": migration.name, "checksum": migration.checksum}
            connection.execute(query("record_migration"), row)
        connection.execute("select email_partitions_make(now(), 1)")
