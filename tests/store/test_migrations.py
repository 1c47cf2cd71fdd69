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
from dispatcher.store.indexes import without_indexes
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

            text = without_indexes(migration.text)
            connection.execute(migration.text.encode() if "using index" in text else text.encode())

            locked = connection.execute(BLOCKING_LOCKS).fetchall()
            unexpected = {name for (name,) in locked} & before - tables_to_lock(text).keys()
            # The release before does not use `email_event`, which migration 0021 has created.
            assert not unexpected - {"email_event" if migration.number == 22 else ""}, migration.subject


def test_an_upgrade_makes_the_indexes_and_columns_of_a_new_database(empty_database_url: str, tables_url: str) -> None:
    create_tables(empty_database_url, before=18)
    with connected(empty_database_url) as connection:
        migrate(connection)

    assert schema_of(empty_database_url) == schema_of(tables_url)


def schema_of(database_url: str) -> set[tuple[str, ...]]:
    """The indexes and columns of every table, without partitions, whose indexes may have other names."""
    with psycopg.connect(database_url) as connection:
        return set(connection.execute(SCHEMA).fetchall())


def test_every_unique_text_key_is_compared_byte_by_byte(tables_url: str) -> None:
    with psycopg.connect(tables_url) as connection:
        assert connection.execute(UNIQUE_TEXTS).fetchall() == []


def test_a_row_that_the_old_index_did_not_find_is_named_before_the_swap(empty_database_url: str) -> None:
    create_tables(empty_database_url, before=53)
    with connected(empty_database_url) as connection:
        connection.execute("alter table dispatcher.email_idempotency drop constraint email_idempotency_pkey")
        connection.execute(
            "insert into dispatcher.email_idempotency (tenant_id, message_key, email_id, payload_hash) "
            "select 'acme', 'secret-key', gen_random_uuid(), '' from generate_series(1, 2)"
        )

        with pytest.raises(SchemaError, match=r"email_idempotency_bytes .* two rows have the same key") as told:
            migrate(connection)

    assert "C library" in (told.value.remedy or "")
    assert "secret-key" not in str(told.value)


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


def test_old_attempts_and_new_ones_are_read_alike_after_an_upgrade(empty_database_url: str) -> None:
    role = f"reader_{secrets.token_hex(4)}"
    create_tables(empty_database_url, before=64)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("set search_path = dispatcher, pg_temp")
        connection.execute(f"create role {role}; grant usage on schema dispatcher to {role}".encode())
        try:
            connection.execute(f"grant select on email_attempt, email_log to {role}".encode())
            connection.execute(
                "insert into email_attempt values (gen_random_uuid(), 1, 'w0', 'smtp', now(), now(), 'accepted')"
            )
            with connected(empty_database_url) as owner:
                migrate(owner)
            connection.execute(
                "insert into email_log (email_id, tenant_id, message_key, status, attempt_count, provider, "
                "attempt_worker, attempt_started_at, attempt_finished_at) "
                "values (gen_random_uuid(), 'default', 'k', 'sent', 1, 'smtp', 'w1', now(), now())"
            )
            connection.execute(f"set role {role}".encode())

            rows = connection.execute(
                "select attempt_number, worker, provider, outcome, error from every_attempt order by worker"
            ).fetchall()

            assert rows == [(1, "w0", "smtp", "accepted", None), (1, "w1", "smtp", "accepted", None)]
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


@pytest.mark.parametrize(("right", "may_write"), [("insert", False), ("update", True), ("select", None)])
def test_after_an_upgrade_applications_may_read_whether_the_relay_polls_and_relays_may_change_it(
    empty_database_url: str, right: str, may_write: bool | None
) -> None:
    role = f"role_{secrets.token_hex(4)}"
    create_tables(empty_database_url, before=52)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(f"create role {role}; grant {right} on dispatcher.email_log to {role}".encode())
        try:
            with connected(empty_database_url) as owner:
                migrate(owner)

            found = connection.execute(
                "select has_table_privilege(%(role)s, 'dispatcher.relay_polls', 'select'),"
                " has_table_privilege(%(role)s, 'dispatcher.relay_polls', 'insert'),"
                " has_table_privilege(%(role)s, 'dispatcher.relay_polls', 'delete')",
                {"role": role},
            ).fetchone()
        finally:
            connection.execute(f"drop owned by {role}; drop role {role}".encode())

    assert found == (may_write is not None, bool(may_write), bool(may_write))
