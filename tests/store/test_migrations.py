"""Migrations are applied once. A database of a different release, encoding or application is refused."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from dispatcher import Email, enqueue
from dispatcher.dev.servers import Servers
from dispatcher.errors import SchemaError
from dispatcher.store.connections import connected
from dispatcher.store.migrations import WEEKS_AHEAD, all_migrations, migrate, tables_to_lock, verify_schema
from tests.store.old_tables import create_tables

PARTITIONED = ("email_log", "email_content", "email_attachment", "email_attempt", "email_event", "email_recipient")
BLOCKING_LOCKS = """
    select regexp_replace(c.relname, '(_p[0-9]+|_default)$', '')
    from pg_locks as l join pg_class as c on c.oid = l.relation
    where l.pid = pg_backend_pid() and c.relkind in ('r', 'p') and c.relnamespace = 'dispatcher'::regnamespace
        and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
"""The tables that this transaction keeps others from writing; of a partition, its table."""
STORED = """
    select relname, relfilenode from pg_class
    where relkind in ('r', 'i') and relnamespace = 'dispatcher'::regnamespace and relname like 'email_log%'
"""
"""The file of each partition and index. PostgreSQL writes a new file when it rewrites or rebuilds one of them."""
ALL_TABLES = "select relname from pg_class where relkind in ('r', 'p') and relnamespace = 'dispatcher'::regnamespace"


def tables(connection: psycopg.Connection) -> set[str]:
    found = connection.execute("select relname from pg_class where relkind in ('r', 'p') and relname ~ '^(email|disp)'")
    return {name for (name,) in found}


def test_an_empty_database_gets_every_table_and_its_partitions(empty_database_url: str) -> None:
    with connected(empty_database_url) as connection:
        changes = migrate(connection)

        verify_schema(connection)
        made = tables(connection)

    partitions = len(PARTITIONED) * (WEEKS_AHEAD + 1)
    assert changes == [
        "created schema dispatcher",
        *[f"applied migration {migration.number:04} {migration.name}" for migration in all_migrations()],
        f"created {partitions} partitions",
    ]
    assert {*PARTITIONED, *(f"{name}_default" for name in PARTITIONED), "email_idempotency"} <= made


def test_a_second_call_changes_nothing(database_url: str) -> None:
    with connected(database_url) as connection:
        migrate(connection)  # a week may have ended since the database's template was made
        before = tables(connection)

        assert migrate(connection) == []

        assert tables(connection) == before


@pytest.mark.parametrize("tables", ["none", "of an earlier release"])
def test_concurrent_calls_migrate_once(empty_database_url: str, tables: str) -> None:
    if tables != "none":
        create_tables(empty_database_url, before=33)

    def run(_: int) -> list[str]:
        with connected(empty_database_url) as connection:
            return migrate(connection)

    with ThreadPoolExecutor(4) as threads:
        changes = sorted(threads.map(run, range(4)), key=len)

    assert changes[:3] == [[], [], []]
    assert changes[3] != []


def test_a_migration_locks_in_advance_every_table_that_it_blocks(empty_database_url: str) -> None:
    create_tables(empty_database_url, before=18)
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("set search_path = dispatcher, pg_temp")
        for migration in (each for each in all_migrations() if each.number >= 18):
            before = {name for (name,) in connection.execute(ALL_TABLES)}
            connection.commit()

            connection.execute(migration.text.encode())

            locked = connection.execute(BLOCKING_LOCKS).fetchall()
            unexpected = {name for (name,) in locked} & before - tables_to_lock(migration.text).keys()
            # The release before does not use `email_event`, which migration 0021 has created.
            assert not unexpected - {"email_event" if migration.number == 22 else ""}, migration.subject


def test_the_migrations_of_a_new_database_are_all_or_nothing(empty_database_url: str) -> None:
    with connected(empty_database_url) as connection:
        connection.execute("create schema dispatcher")
        connection.execute("create table dispatcher.email_hourly (mine integer)")

        with pytest.raises(
            SchemaError, match=r'Migration 0001 emails .* relation "email_hourly" already exists'
        ) as told:
            migrate(connection)

        assert tables(connection) == {"email_hourly"}
    assert "DISPATCHER_DATABASE_SCHEMA" in (told.value.remedy or "")


def test_a_migration_that_was_edited_after_it_was_applied_is_refused(database_url: str) -> None:
    with connected(database_url) as connection:
        connection.execute("update dispatcher_migration set checksum = 'of another text' where number = 1")

        for check in (migrate, verify_schema):
            with pytest.raises(SchemaError, match="0001 emails was edited"):
                check(connection)


def test_a_database_of_a_later_release_is_refused(database_url: str) -> None:
    with connected(database_url) as connection:
        connection.execute("insert into dispatcher_migration (number, name, checksum) values (9999, 'later', 'x')")

        for check in (migrate, verify_schema):
            with pytest.raises(SchemaError, match="9999 later, which this release does not have"):
                check(connection)


def test_an_unmigrated_and_an_older_database_are_refused_with_a_remedy(empty_database_url: str) -> None:
    with connected(empty_database_url) as connection:
        with pytest.raises(SchemaError, match=r"lacks \d+ migrations of this release") as never:
            verify_schema(connection)
        migrate(connection)
        connection.execute("delete from dispatcher_migration where number = 1")
        with pytest.raises(SchemaError, match="0001 emails") as behind:
            verify_schema(connection)

    assert never.value.remedy == behind.value.remedy == "Run `dispatcher init`."


def test_a_database_with_another_encoding_than_utf8_is_refused(servers: Servers) -> None:
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(
            f"create database {name} encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'".encode()
        )
        try:
            url = urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
            with connected(url) as connection, pytest.raises(SchemaError, match="LATIN1"):
                migrate(connection)
        finally:
            administration.execute(f"drop database {name} with (force)".encode())


def test_an_application_enqueues_after_an_upgrade_with_the_rights_of_the_release_before(
    empty_database_url: str,
) -> None:
    role = f"app_{secrets.token_hex(4)}"
    rights = f"""
        create role {role};
        grant usage on schema dispatcher to {role};
        grant insert on dispatcher.email_idempotency, dispatcher.email_log, dispatcher.email_content to {role};
        grant select (tenant_id, message_key, email_id, payload_hash) on dispatcher.email_idempotency to {role};
        grant select (email_id, publish_due_at) on dispatcher.email_log to {role};
        grant select on dispatcher.lane_policy, dispatcher.lane_rule to {role};
    """
    create_tables(empty_database_url, before=33)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("set search_path = dispatcher, pg_temp")
        connection.execute(rights.encode())
        try:
            with connected(empty_database_url) as owner:
                migrate(owner)
            connection.execute(f"set role {role}".encode())

            enqueue(
                connection,
                Email(message_key="k-1", sender="a@example.com", to="b@example.org", subject="Hello", text="Hello."),
            )

            for private in ("address_key from dispatcher.dispatcher_database", "* from dispatcher.email_recipient"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(f"select {private}".encode())
            connection.execute("reset role")
            assert connection.execute("select count(*) from dispatcher.email_recipient").fetchone() == (1,)
        finally:
            connection.execute("reset role")
            connection.execute(f"drop owned by {role}; drop role {role}".encode())


def test_columns_adopt_domains_without_rewriting_a_table_or_an_index(empty_database_url: str) -> None:
    create_tables(empty_database_url, before=56)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        before: dict[str, int] = dict(connection.execute(STORED).fetchall())

        migrate(connection)

        after: dict[str, int] = dict(connection.execute(STORED).fetchall())
    assert {name: after[name] for name in before} == before
