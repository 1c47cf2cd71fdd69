"""Migrations are applied once. A database of a different release, encoding or application is refused."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from dispatcher.dev.servers import Servers
from dispatcher.errors import SchemaError
from dispatcher.store.connections import connected
from dispatcher.store.indexes import without_indexes
from dispatcher.store.migrations import WEEKS_AHEAD, all_migrations, migrate, tables_to_lock, verify_schema
from tests.store.later_release import MIGRATIONS

PARTITIONED = ("email_log", "email_content", "email_attachment", "email_attempt", "email_event", "email_recipient")
BLOCKING_LOCKS = """
    select regexp_replace(c.relname, '(_p[0-9]+|_default)$', '')
    from pg_locks as l join pg_class as c on c.oid = l.relation
    where l.pid = pg_backend_pid() and c.relkind in ('r', 'p') and c.relnamespace = 'dispatcher'::regnamespace
        and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
"""The tables that this transaction keeps others from writing; of a partition, its table."""
ALL_TABLES = "select relname from pg_class where relkind in ('r', 'p') and relnamespace = 'dispatcher'::regnamespace"

SCHEMA = """
    select tablename, indexname, indexdef, '' from pg_indexes
    where schemaname = 'dispatcher' and tablename !~ '(_p[0-9]+|_default)$'
    union all
    select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), coalesce(l.collname, '')
    from pg_attribute as a
    join pg_class as c on c.oid = a.attrelid and c.relkind in ('r', 'p') and a.attnum > 0 and not a.attisdropped
    left join pg_collation as l on l.oid = a.attcollation
    where c.relnamespace = 'dispatcher'::regnamespace and c.relname !~ '(_p[0-9]+|_default)$'
"""
UNIQUE_TEXTS = """
    select i.indexrelid::regclass::text, a.attname
    from pg_index as i
    join pg_class as c on c.oid = i.indexrelid and c.relnamespace = 'dispatcher'::regnamespace
    cross join lateral unnest(i.indcollation::oid[]) with ordinality as used (collation_id, number)
    join pg_attribute as a on a.attrelid = i.indexrelid and a.attnum = used.number
    left join pg_collation as l on l.oid = used.collation_id
    where i.indisunique and used.collation_id <> 0 and l.collname <> 'C'
"""
"""The texts in unique indexes whose order depends on the operating system."""
LAST_BEFORE_BASELINE = (65, "lease_indexes", "ae1626ac4e39d11272c063aec46a396e344a0feac779512a65569d53935a64aa")
FIRST_BASELINE = (1, "baseline", "5f443c0ea190afab8083233a1b91dc480c2ea064e6178faab7a0392ad42b6416")


@pytest.fixture
def become_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives this process the migrations of a later release."""
    return lambda: monkeypatch.setattr("dispatcher.store.migrations.all_migrations", lambda: MIGRATIONS)


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


@pytest.mark.parametrize("is_new", [True, False])
def test_concurrent_calls_migrate_once(empty_database_url: str, become_later: Callable[[], None], is_new: bool) -> None:
    if not is_new:
        with connected(empty_database_url) as connection:
            migrate(connection)
        become_later()

    def run(_: int) -> list[str]:
        with connected(empty_database_url) as connection:
            return migrate(connection)

    with ThreadPoolExecutor(4) as threads:
        changes = sorted(threads.map(run, range(4)), key=len)

    assert changes[:3] == [[], [], []]
    assert changes[3] != []


def test_a_migration_locks_in_advance_every_table_that_it_blocks(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("set search_path = dispatcher, pg_temp")
        for migration in MIGRATIONS[1:]:
            before = {name for (name,) in connection.execute(ALL_TABLES)}
            connection.commit()

            text = without_indexes(migration.text)
            connection.execute(text.encode())

            locked = connection.execute(BLOCKING_LOCKS).fetchall()
            assert not {name for (name,) in locked} & before - tables_to_lock(text).keys(), migration.subject


def test_an_upgrade_makes_the_indexes_and_columns_of_a_new_database(
    empty_database_url: str, database_url: str, become_later: Callable[[], None]
) -> None:
    become_later()

    with connected(empty_database_url) as new, connected(database_url) as old:
        migrate(new)
        changes = migrate(old)

    assert changes == [
        "applied migration 0002 two_tables",
        "applied migration 0003 event_index",
        "built index email_event_later",
        "applied migration 0004 listing",
        "built index suppression_later",
    ]
    assert schema_of(empty_database_url) == schema_of(database_url)


def schema_of(database_url: str) -> set[tuple[str, ...]]:
    """The indexes and columns of every table, without partitions, whose indexes may have other names."""
    with psycopg.connect(database_url) as connection:
        return set(connection.execute(SCHEMA).fetchall())


def test_every_unique_text_key_is_compared_byte_by_byte(tables_url: str) -> None:
    with psycopg.connect(tables_url) as connection:
        assert connection.execute(UNIQUE_TEXTS).fetchall() == []


def test_the_migrations_of_a_new_database_are_all_or_nothing(empty_database_url: str) -> None:
    with connected(empty_database_url) as connection:
        connection.execute("create schema dispatcher")
        connection.execute("create table dispatcher.email_hourly (mine integer)")

        with pytest.raises(
            SchemaError, match=r'Migration 0001 baseline .* relation "email_hourly" already exists'
        ) as told:
            migrate(connection)

        assert tables(connection) == {"email_hourly"}
    assert "DISPATCHER_DATABASE_SCHEMA" in (told.value.remedy or "")


def test_two_rows_with_the_key_of_an_index_that_is_built_are_refused_with_a_remedy(database_url: str) -> None:
    insert = (
        "insert into outgoing_event (made_in, position, kind, email_id, tenant_id, message_key) "
        "overriding system value values ('1', 1, 'sent', gen_random_uuid(), 'default', 'key')"
    )
    with connected(database_url) as connection:
        connection.execute("drop index outgoing_event_feed")
        connection.execute(insert)
        connection.execute(insert)

        with pytest.raises(SchemaError, match=r"outgoing_event_feed failed .* two rows have the same key") as refused:
            migrate(connection)

    assert "Delete the younger row" in (refused.value.remedy or "")


def test_a_migration_that_was_edited_after_it_was_applied_is_refused(database_url: str) -> None:
    with connected(database_url) as connection:
        connection.execute("update dispatcher_migration set checksum = 'of another text' where number = 1")

        for check in (migrate, verify_schema):
            with pytest.raises(SchemaError, match="0001 baseline was edited"):
                check(connection)


def record_old_migrations(connection: psycopg.Connection, *last: object) -> None:
    """Records the migrations of a program from before the baseline, which ended with this one."""
    connection.execute("delete from dispatcher_migration")
    for row in {1: (1, "emails", "of the first text"), last[0]: last}.values():
        connection.execute("insert into dispatcher_migration (number, name, checksum) values (%s, %s, %s)", row)


@pytest.mark.parametrize("last", [LAST_BEFORE_BASELINE, FIRST_BASELINE])
def test_the_tables_of_the_commits_before_the_baseline_are_recorded_as_at_the_baseline(
    database_url: str, become_later: Callable[[], None], last: tuple[object, ...]
) -> None:
    become_later()
    with connected(database_url) as connection:
        record_old_migrations(connection, *last)
        with pytest.raises(SchemaError, match=r"lacks .* 0001 baseline, 0002 two_tables") as before:
            verify_schema(connection)

        changes = migrate(connection)

        assert changes[:2] == [
            "recorded the tables of an earlier commit as migration 0001 baseline",
            "applied migration 0002 two_tables",
        ]
        assert migrate(connection) == []
        verify_schema(connection)
        # A program of that commit reads the numbers in order, and refuses the first one that it does not know.
        assert connection.execute("select min(number) from dispatcher_migration").fetchone() == (0,)
    assert before.value.remedy == "Run `dispatcher init`."


@pytest.mark.parametrize(
    "last",
    [
        (64, "attempts_in_rows", "of its text"),
        (*LAST_BEFORE_BASELINE[:2], "of another text"),
        (66, "of_nobody", "of its text"),
    ],
)
def test_any_other_tables_from_before_the_baseline_are_refused_with_a_remedy(
    database_url: str, last: tuple[object, ...]
) -> None:
    with connected(database_url) as connection:
        record_old_migrations(connection, *last)
        before = connection.execute("select * from dispatcher_migration").fetchall()

        for check in (migrate, verify_schema):
            with pytest.raises(SchemaError, match=rf"00{last[0]} {last[1]}, from before the baseline") as refused:
                check(connection)
            assert "Run `dispatcher init` of commit bb5680df first" in (refused.value.remedy or "")

        assert connection.execute("select * from dispatcher_migration").fetchall() == before


def test_a_database_of_a_later_release_is_refused(database_url: str) -> None:
    with connected(database_url) as connection:
        connection.execute("insert into dispatcher_migration (number, name, checksum) values (9999, 'later', 'x')")

        for check in (migrate, verify_schema):
            with pytest.raises(SchemaError, match="9999 later, which this release does not have"):
                check(connection)


def test_an_unmigrated_and_an_older_database_are_refused_with_a_remedy(empty_database_url: str) -> None:
    with connected(empty_database_url) as connection:
        with pytest.raises(SchemaError, match=r"lacks \d+ migrations? of this release") as never:
            verify_schema(connection)
        migrate(connection)
        connection.execute("delete from dispatcher_migration where number = 1")
        with pytest.raises(SchemaError, match="0001 baseline") as behind:
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
