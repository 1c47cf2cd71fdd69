"""Our tables in their schema work in an application's database, with any search_path."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from dispatcher import Email, enqueue
from dispatcher.config import load
from dispatcher.errors import ConfigurationError, SchemaError
from dispatcher.store import queries
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate, verify_schema
from dispatcher.store.queries import all_queries

EMAIL = Email(message_key="key", sender="a@example.com", to="b@example.org", subject="Hello", text="It works.")
UseSchema = Callable[[str], None]
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
    """Sets DISPATCHER_DATABASE_SCHEMA when called; resets it after the test."""

    def use(name: str) -> None:
        monkeypatch.setenv("DISPATCHER_DATABASE_SCHEMA", name)
        queries.schema.cache_clear()

    yield use
    monkeypatch.undo()
    queries.schema.cache_clear()


@pytest.mark.parametrize("path", ['"$user", public', "public", "''"])
def test_enqueue_needs_no_search_path_and_calls_no_function_of_the_application(database_url: str, path: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(SHADOWS.encode())
        connection.execute(f"set search_path = {path}".encode())
        before = connection.execute("show search_path").fetchone()

        first, second = enqueue(connection, EMAIL), enqueue(connection, EMAIL)

        assert first.email_id == second.email_id
        assert connection.execute("show search_path").fetchone() == before
        stored = connection.execute("select email_id from dispatcher.email_log").fetchall()
        assert stored == [(first.email_id,)]


def test_the_function_that_reads_the_secret_key_calls_no_function_of_the_caller(database_url: str) -> None:
    hashes = "select dispatcher.hash_addresses(array['ann@example.org'])"
    with psycopg.connect(database_url) as connection:
        usual = connection.execute(hashes).fetchone()
        connection.execute(SHADOWS.encode())
        connection.execute("set search_path = public, pg_catalog")

        assert connection.execute(hashes).fetchone() == usual
        with pytest.raises(psycopg.errors.RaiseException, match="a function of the application was called"):
            connection.execute("select sha256('')")


def test_a_caller_of_the_function_cannot_read_the_secret_key_from_a_logged_plan(database_url: str) -> None:
    notices: list[str] = []
    with psycopg.connect(database_url) as connection:
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


def test_all_tables_and_functions_are_created_in_the_configured_schema(
    empty_database_url: str, use_schema: UseSchema
) -> None:
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


def test_tables_in_another_schema_are_reported_with_the_setting_to_use(
    empty_database_url: str, use_schema: UseSchema
) -> None:
    with connected(empty_database_url) as connection:
        use_schema("public")
        migrate(connection)
        use_schema("dispatcher")
        for look in (migrate, verify_schema):
            with pytest.raises(SchemaError, match='but in the schema "public"') as refused:
                look(connection)
            assert "DISPATCHER_DATABASE_SCHEMA=public" in (refused.value.remedy or "")
        assert connection.execute("select to_regnamespace('dispatcher')").fetchone() == (None,)

        use_schema("public")
        assert migrate(connection) == []
        verify_schema(connection)


def test_another_sessions_temporary_table_is_not_taken_for_the_dispatchers(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as other:
        other.execute("create temporary table dispatcher_migration (checksum text)")
        with connected(empty_database_url) as connection:
            assert migrate(connection)[0] == "created schema dispatcher"


def test_a_second_dispatcher_in_one_database_is_refused(database_url: str, use_schema: UseSchema) -> None:
    use_schema("other")
    with connected(database_url) as connection, pytest.raises(SchemaError, match='but in the schema "dispatcher"'):
        migrate(connection)


def test_a_role_that_cannot_create_the_schema_gets_a_remedy(empty_database_url: str) -> None:
    name = f"poor_{secrets.token_hex(4)}"
    with psycopg.connect(empty_database_url, autocommit=True) as administration:
        administration.execute(sql.SQL("create role {} login password 'poor'").format(sql.Identifier(name)))
        try:
            parts = urlsplit(empty_database_url)
            url = parts._replace(netloc=f"{name}:poor@{parts.hostname}:{parts.port}").geturl()
            with (
                connected(url) as connection,
                pytest.raises(SchemaError, match="permission denied for database") as refused,
            ):
                migrate(connection)
        finally:
            administration.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))
    assert 'create schema "dispatcher" authorization' in (refused.value.remedy or "")


@pytest.mark.parametrize(
    "text",
    ["Mail", "1st", "a b", "a.b", 'a"b', "a;b", "a'b", "pg_catalog", "pg_temp", "information_schema", "é", "a" * 64],
)
def test_an_invalid_schema_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="DISPATCHER_DATABASE_SCHEMA must be"):
        load({"DISPATCHER_DATABASE_SCHEMA": text})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "from dispatcher.email_log"),
        ({"DISPATCHER_DATABASE_SCHEMA": WORD}, 'from "order".email_log'),
        ({"DISPATCHER_DATABASE_SCHEMA": "No; name"}, "ConfigurationError: DISPATCHER_DATABASE_SCHEMA must be"),
    ],
)
def test_an_application_sets_the_schema_in_its_environment(environment: dict[str, str], words: str) -> None:
    program = "from dispatcher.store.queries import query; print(query('find_email').decode())"

    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )

    assert words in ended.stdout + ended.stderr
