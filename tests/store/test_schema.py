"""Our tables in their schema work in an application's database, with any search_path. Migrations are applied once. A
database of a different release, encoding or application is refused."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from dispatcher import Email, enqueue
from dispatcher.config import load
from dispatcher.dev.servers import Servers
from dispatcher.errors import ConfigurationError, SchemaError
from dispatcher.store import queries
from dispatcher.store.connections import connected
from dispatcher.store.migrations import WEEKS_AHEAD, all_migrations, migrate, verify_schema
from dispatcher.store.queries import all_queries
from tests.store.later_release import MIGRATIONS

EMAIL = Email(message_key="key", sender="a@example.com", to="b@example.org", subject="Hello", text="It works.")
UseSchema = Callable[[str], None]
PARTITIONED = ("email_log", "email_content", "email_attachment", "email_attempt", "email_event", "email_recipient")
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
WORD = "order"
"""A reserved word of SQL, which is a valid schema name only in quotes."""
SHADOWS = """
    create table public.email_log (mine integer);
    create table public.email_idempotency (mine integer);
    create function public.trap() returns boolean language plpgsql as
        'begin raise exception ''a function of the application was called''; end';
    create function public.trapped(double precision, integer) returns boolean language sql as 'select public.trap()';
    create function public.trapped(integer, interval) returns interval language sql
        as 'select interval ''0'' where public.trap()';
    create function public.trapped(smallint, interval) returns interval language sql
        as 'select interval ''0'' where public.trap()';
    create operator public.= (leftarg = double precision, rightarg = integer, function = public.trapped);
    create operator public.* (leftarg = integer, rightarg = interval, function = public.trapped);
    create operator public.* (leftarg = smallint, rightarg = interval, function = public.trapped);
    create function public.pg_notify(varchar, varchar) returns void language sql as 'select public.trap()';
    create function public.clock_timestamp() returns timestamptz language sql
        as 'select pg_catalog.now() where public.trap()';
    create table public.dispatcher_database (address_key_inner bytea, address_key_outer bytea);
    create function public.sha256(bytea) returns bytea language sql as 'select ''\\x00''::bytea where public.trap()';
    create function public.convert_to(text, varchar) returns bytea language sql
        as 'select ''\\x00''::bytea where public.trap()';
    create function public.array_append(bytea[], bytea) returns bytea[] language sql
        as 'select null::bytea[] where public.trap()';
    create function public.substring(bytea, integer, integer) returns bytea language sql
        as 'select null::bytea where public.trap()';
    create function public.trapped(bytea, bytea) returns bytea language sql as 'select $1 where public.trap()';
    create operator public.|| (leftarg = bytea, rightarg = bytea, function = public.trapped);
    create function public.current_setting(varchar) returns text language sql as 'select ''off'' where public.trap()';
"""
"""Objects of an application that PostgreSQL could confuse with our objects or with PostgreSQL's own."""


@pytest.fixture
def use_schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[UseSchema]:
    def use(name: str) -> None:
        monkeypatch.setenv("DISPATCHER_DATABASE_SCHEMA", name)
        queries.schema.cache_clear()

    yield use
    monkeypatch.undo()
    queries.schema.cache_clear()


def test_enqueue_and_the_function_that_reads_the_secret_key_call_no_function_of_applications(
    tables_url: str,
) -> None:
    hashes = "select dispatcher.hash_addresses(array['ann@example.org'])"
    with psycopg.connect(tables_url) as connection:
        usual = connection.execute(hashes).fetchone()
        connection.execute(SHADOWS.encode())
        for path in ('"$user", public', "public", "''"):
            with connection.transaction(force_rollback=True):
                connection.execute(f"set search_path = {path}".encode())
                before = connection.execute("show search_path").fetchone()

                first, second = enqueue(connection, EMAIL), enqueue(connection, EMAIL)

                assert first.email_id == second.email_id
                assert connection.execute("show search_path").fetchone() == before
                stored = connection.execute("select email_id from dispatcher.email_log").fetchall()
                assert stored == [(first.email_id,)]

        connection.execute("set search_path = public, pg_catalog")
        assert connection.execute(hashes).fetchone() == usual
        with pytest.raises(psycopg.errors.RaiseException, match="a function of the application was called"):
            connection.execute("select sha256('')")
        connection.rollback()


def test_a_caller_of_the_function_cannot_read_the_secret_key_from_a_logged_plan(tables_url: str) -> None:
    notices: list[str] = []
    with psycopg.connect(tables_url) as connection:
        keys = connection.execute("select address_key_inner, address_key_outer from dispatcher.dispatcher_database")
        # A plan shows the octets of a constant as signed numbers.
        secrets_in_plans = [" ".join(map(str, memoryview(key).cast("b")[:8])) for key in keys.fetchone() or ()]
        connection.add_notice_handler(lambda told: notices.append(f"{told.message_primary} {told.message_detail}"))
        connection.execute("set client_min_messages = log")
        for name in ("debug_print_parse", "debug_print_rewritten", "debug_print_plan"):
            connection.execute(f"set {name} = on".encode())
        for mode in ("auto", "force_custom_plan", "force_generic_plan"):
            connection.execute(f"set plan_cache_mode = {mode}".encode())
            connection.execute("select dispatcher.hash_addresses(array['ann@example.org'])")

    plans = [text for text in notices if "PLANNEDSTMT" in text]
    assert len(plans) > 3  # of the three calls, and of the query in the function
    assert len(secrets_in_plans) == 2
    assert [text for text in notices for secret in secrets_in_plans if secret in text] == []


def test_all_tables_and_functions_are_in_the_configured_schema(empty_database_url: str, use_schema: UseSchema) -> None:
    use_schema(WORD)
    with connected(empty_database_url) as connection:
        connection.execute("create table public.api_key (mine integer)")

        assert migrate(connection)[0] == f"created schema {WORD}"
        assert migrate(connection) == []

        verify_schema(connection)
        elsewhere = connection.execute(
            "select nspname, relname from pg_class join pg_namespace as n on n.oid = relnamespace "
            "where nspname not in ('information_schema', %s) and nspname !~ '^pg_'",
            [WORD],
        ).fetchall()
        with connection.transaction():
            enqueue(connection, EMAIL)
        assert elsewhere == [("public", "api_key")]
        assert connection.execute('select message_key from "order".email_log').fetchall() == [("key",)]


def test_every_statement_names_only_the_configured_schema(use_schema: UseSchema) -> None:
    ours = re.compile(rb"\bdispatcher\.|\bschema dispatcher\b")
    use_schema(WORD)

    statements = {name: queries.query(name) for name in all_queries()}

    assert not [name for name, text in statements.items() if ours.search(text)]
    for name, text in all_queries().items():
        assert statements[name].count(b'"order"') == len(ours.findall(text))


def test_functions_find_our_tables_with_any_search_path(tables_url: str) -> None:
    with psycopg.connect(tables_url) as connection:
        loose = connection.execute(
            "select proname from pg_proc where pronamespace = 'dispatcher'::regnamespace and prosqlbody is null "
            "and array_to_string(coalesce(proconfig, '{}'), ' ') !~ 'search_path=dispatcher, pg_temp'"
        ).fetchall()

    assert loose == [("hash_addresses",)]  # in this function, every name has its schema


def test_tables_in_another_schema_are_reported_with_the_setting(empty_database_url: str, use_schema: UseSchema) -> None:
    with connected(empty_database_url) as connection:
        use_schema("public")
        migrate(connection)
        use_schema("dispatcher")  # also of a second dispatcher
        for look in (migrate, verify_schema):
            with pytest.raises(SchemaError, match='but in the schema "public"') as refused:
                look(connection)
            assert "DISPATCHER_DATABASE_SCHEMA=public" in (refused.value.remedy or "")
        assert connection.execute("select to_regnamespace('dispatcher')").fetchone() == (None,)

        use_schema("public")
        assert migrate(connection) == []
        verify_schema(connection)


@pytest.mark.parametrize(
    "text",
    ["Mail", "1st", "a b", "a.b", 'a"b', "a;b", "a'b", "pg_catalog", "pg_temp", "information_schema", "é", "a" * 64],
)
def test_an_invalid_schema_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="DISPATCHER_DATABASE_SCHEMA must be"):
        load({"DISPATCHER_DATABASE_SCHEMA": text})


@pytest.fixture
def become_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr("dispatcher.store.migrations.all_migrations", lambda: MIGRATIONS)


def test_an_empty_database_gets_every_table_and_its_partitions_once(empty_database_url: str) -> None:
    with connected(empty_database_url) as connection:
        changes = migrate(connection)

        verify_schema(connection)
        made = {name for (name,) in connection.execute(ALL_TABLES)}
        assert migrate(connection) == []
        assert {name for (name,) in connection.execute(ALL_TABLES)} == made
        assert connection.execute(UNIQUE_TEXTS).fetchall() == []

    partitions = len(PARTITIONED) * (WEEKS_AHEAD + 1)
    assert changes == [
        "created schema dispatcher",
        *[f"applied migration {migration.number:04} {migration.name}" for migration in all_migrations()],
        f"created {partitions} partitions",
    ]
    assert {*PARTITIONED, *(f"{name}_default" for name in PARTITIONED), "email_idempotency"} <= made


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


def test_an_upgrade_makes_the_indexes_and_columns_of_a_new_database(
    empty_database_url: str, database_url: str, become_later: Callable[[], None]
) -> None:
    become_later()

    with connected(empty_database_url) as new, connected(database_url) as old:
        migrate(new)
        changes = migrate(old)

    last = BASELINE[-1][0]
    assert changes == [
        f"applied migration {last + 1:04} two_tables",
        f"applied migration {last + 2:04} event_index",
        "built index email_event_later",
        f"applied migration {last + 3:04} listing",
        "built index suppression_later",
    ]
    assert schema_of(empty_database_url) == schema_of(database_url)


def schema_of(database_url: str) -> set[tuple[str, ...]]:
    """The indexes and columns of every table, without partitions, whose indexes may have other names."""
    with psycopg.connect(database_url) as connection:
        return set(connection.execute(SCHEMA).fetchall())


def test_the_migrations_of_a_new_database_are_all_or_nothing(empty_database_url: str) -> None:
    with connected(empty_database_url) as connection:
        connection.execute("create schema dispatcher")
        connection.execute("create table dispatcher.email_hourly (mine integer)")

        with pytest.raises(
            SchemaError, match=r'Migration 0001 baseline .* relation "email_hourly" already exists'
        ) as told:
            migrate(connection)

        assert connection.execute(ALL_TABLES).fetchall() == [("email_hourly",)]
    assert "DISPATCHER_DATABASE_SCHEMA" in (told.value.remedy or "")


Recorded = tuple[int, str, str]
OLDEST: Recorded = (1, "emails", "of the first text")
LAST_BEFORE_BASELINE = (65, "lease_indexes", "ae1626ac4e39d11272c063aec46a396e344a0feac779512a65569d53935a64aa")
FIRST_BASELINE = (1, "baseline", "5f443c0ea190afab8083233a1b91dc480c2ea064e6178faab7a0392ad42b6416")
BASELINE = [(each.number, each.name, each.checksum) for each in all_migrations()]


def record(connection: psycopg.Connection, *migrations: Recorded) -> None:
    connection.execute("delete from dispatcher_migration")
    for row in migrations:
        connection.execute("insert into dispatcher_migration (number, name, checksum) values (%s, %s, %s)", row)


@pytest.mark.parametrize("recorded", [[OLDEST, LAST_BEFORE_BASELINE], [FIRST_BASELINE]])
def test_the_tables_of_the_commits_before_the_baseline_are_recorded_as_at_the_baseline(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch, become_later: Callable[[], None], recorded: list[Recorded]
) -> None:
    with connected(empty_database_url) as connection:
        monkeypatch.setattr("dispatcher.store.migrations.all_migrations", lambda: MIGRATIONS[:1])
        migrate(connection)
        become_later()
        record(connection, *recorded)
        with pytest.raises(SchemaError, match=r"lacks .* 0001 baseline, 0002 delivery, .*, \d+ two_tables") as before:
            verify_schema(connection)

        changes = migrate(connection)

        assert changes[:2] == [
            "recorded the tables of an earlier commit as migration 0001 baseline",
            "applied migration 0002 delivery",
        ]
        assert migrate(connection) == []
        verify_schema(connection)
        # A program of that commit reads the numbers in order, and refuses the first one that it does not know.
        assert connection.execute("select min(number) from dispatcher_migration").fetchone() == (0,)
    assert before.value.remedy == "Run `dispatcher init`."


BEFORE_BASELINE = "Run `dispatcher init` of commit bb5680df first"


@pytest.mark.parametrize(
    ("recorded", "words", "remedy"),
    [
        ([(1, "baseline", "of another text")], "0001 baseline was edited", ""),
        ([*BASELINE, (9999, "later", "x")], "9999 later, which this release does not have", ""),
        ([OLDEST, (64, "attempts_in_rows", "x")], "0064 attempts_in_rows, from before the baseline", BEFORE_BASELINE),
        ([OLDEST, (65, "lease_indexes", "x")], "0065 lease_indexes, from before the baseline", BEFORE_BASELINE),
    ],
)
def test_tables_of_another_text_or_release_are_refused_with_a_remedy(
    tables_url: str, recorded: list[Recorded], words: str, remedy: str
) -> None:
    with connected(tables_url) as connection, connection.transaction(force_rollback=True):
        record(connection, *recorded)
        before = connection.execute("select * from dispatcher_migration").fetchall()

        for check in (migrate, verify_schema):
            with pytest.raises(SchemaError, match=words) as refused:
                check(connection)
            assert remedy in (refused.value.remedy or "")

        assert connection.execute("select * from dispatcher_migration").fetchall() == before


def test_an_unmigrated_or_older_database_is_refused_with_a_remedy(empty_database_url: str, tables_url: str) -> None:
    lacks = r"lacks \d+ migrations? of this release"
    with connected(empty_database_url) as connection, pytest.raises(SchemaError, match=lacks) as never:
        verify_schema(connection)
    with connected(tables_url) as connection, connection.transaction(force_rollback=True):
        record(connection)
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
