"""Tests session settings, what a session sends, translated errors, and sessions on frozen, restarted or read-only
servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.errors import (
    DispatcherError,
    SchemaError,
    StatementRefused,
    StoreRefused,
    StoreTooSlow,
    StoreUnavailable,
    ValueRefused,
)
from dispatcher.store.arrays import BatchDumper
from dispatcher.store.connections import TimedSession, connect_async, connected, make_pool, session, translated
from dispatcher.store.statements import fetch
from tests.broker.proxy import Proxy
from tests.store.books import Books
from tests.waiting import DEADLINE_SECONDS, until

SETTINGS = {
    "synchronous_commit": "on",
    "statement_timeout": "30000",
    "lock_timeout": "10000",
    "idle_in_transaction_session_timeout": "60000",
    "application_name": "some name",
    "enable_seqscan": "off",
    "jit": "off",
    # The server notices a vanished client.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15000",
}


async def test_a_commit_waits_for_the_disk_and_every_other_wait_has_a_timeout(tables_url: str) -> None:
    settings = "select name, setting from pg_settings where name = any(%s)"
    async with await connect_async(tables_url, name="some name") as opened:
        assert opened.autocommit
        assert dict(await (await opened.execute(settings, [[*SETTINGS]])).fetchall()) == SETTINGS
    async with make_pool(tables_url, name="some name", size=1) as pool, session(pool) as pooled:
        assert dict(await (await pooled.execute(settings, [[*SETTINGS]])).fetchall()) == SETTINGS


async def test_text_arrives_unchanged_whatever_encoding_the_environment_sets(
    tables_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with await connect_async(tables_url, name="some name") as opened:
        (row,) = await (await opened.execute("select %s::text[], %s::text", [["é", "日本"], "日本"])).fetchall()
    with connected(tables_url) as simple:
        (plain,) = simple.execute("select %s::text", ["日本"]).fetchall()

    assert row == (["é", "日本"], "日本")
    assert plain == ("日本",)


UNREACHABLE = "postgresql://nobody@127.0.0.1:1/nothing"


def with_wrong_password(url: str) -> str:
    return url.replace(":", ":wrong", 2).replace(":wrong", ":", 1)


def test_a_refused_connection_or_password_is_store_unavailable_and_no_password_is_repeated(
    tables_url: str,
) -> None:
    with pytest.raises(StoreUnavailable, match="not available"), connected(UNREACHABLE):
        pass
    with pytest.raises(StoreUnavailable) as told, connected(with_wrong_password(tables_url)):
        pass

    assert "wrong" not in str(told.value)


async def test_a_pool_that_cannot_connect_raises_the_cause_in_time(tables_url: str) -> None:
    refusal = r"password authentication failed.*Correct the user and password"
    for url, seconds, fault, words in (
        (UNREACHABLE, 0.2, StoreUnavailable, "not available"),
        (with_wrong_password(tables_url), 1, StoreRefused, refusal),
    ):
        async with make_pool(url, name="x", size=1) as pool:
            pool.timeout = seconds
            with pytest.raises(fault, match=words):
                async with session(pool):
                    pass


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("select * from no_such_table", SchemaError),
        ("select no_such_function()", SchemaError),
        ("set statement_timeout = 1; select pg_sleep(5)", StoreTooSlow),
        ("select pg_terminate_backend(pg_backend_pid())", StoreUnavailable),
        ("do $$ begin raise sqlstate '25P03'; end $$", StoreUnavailable),
        ("do $$ begin raise sqlstate '40P01'; end $$", StoreUnavailable),
        ("do $$ begin raise sqlstate '40001'; end $$", StoreUnavailable),
        ("do $$ begin raise sqlstate '53100'; end $$", StoreUnavailable),
        ("set default_transaction_read_only = on; delete from email_log", StoreUnavailable),
        ("select 1/0", ValueRefused),
        ("select 'not a number'::integer", ValueRefused),
        ("do $$ begin raise sqlstate 'XX000'; end $$", StatementRefused),
        ("do $$ begin raise sqlstate '58030'; end $$", StatementRefused),
    ],
)
def test_every_server_error_is_translated(tables_url: str, statement: str, fault: type[DispatcherError]) -> None:
    parts = [statement] if statement.startswith("do") else statement.split("; ")
    with connected(tables_url) as connection:
        for part in parts[:-1]:
            connection.execute(part.encode())

        with pytest.raises(DispatcherError) as raised, translated():
            connection.execute(parts[-1].encode())

    assert type(raised.value) is fault
    assert "not a number" not in str(raised.value)


async def test_only_one_block_fails_after_all_sessions_were_terminated(tables_url: str, books: Books) -> None:
    async with make_pool(tables_url, name="several", size=4) as pool:
        await until(lambda: len(books.sessions("several")) == 4)
        assert books.terminate("several") == 4

        with pytest.raises(StoreUnavailable):
            async with session(pool) as opened:
                await fetch(opened, "list_migrations")
        for _ in range(4):
            async with session(pool) as opened:
                assert await fetch(opened, "list_migrations")


async def test_a_task_cancelled_while_it_gets_a_session_from_the_pool_ends(tables_url: str) -> None:
    pool = make_pool(tables_url, name="busy", size=1)
    await pool.open(wait=True)

    async def use_again_and_again() -> None:
        while True:
            async with session(pool) as opened:
                await opened.execute("select 1")
            await asyncio.Event().wait()

    async def cancel_while_handing_over(steps_between: int) -> None:
        taken = await pool.getconn()
        waiting = asyncio.create_task(use_again_and_again())
        await take_steps(5)
        giving_back = asyncio.create_task(pool.putconn(taken))
        await take_steps(steps_between)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=DEADLINE_SECONDS)
        assert waiting.cancelled(), f"the cancellation was lost, {steps_between} steps after the hand-over began"
        await giving_back

    # Try each step of the event loop, because the critical moment lasts only a few steps.
    for steps in range(30):
        await cancel_while_handing_over(steps)
    await pool.close()


async def test_a_frozen_server_is_store_unavailable_as_soon_as_a_probe_fails(tables_url: str) -> None:
    async with Proxy(tables_url) as server:
        opened = await connect_async(server.url, name="patient")
        assert isinstance(opened, TimedSession)
        opened.probe_seconds = 0.2
        server.freeze_node()

        async with asyncio.timeout(10):  # without the probe, the session would wait for `answer_seconds`
            with pytest.raises(StoreUnavailable), translated():
                await opened.execute("select 1")


async def test_a_slow_statement_continues_while_the_server_answers_probes(tables_url: str) -> None:
    async with await connect_async(tables_url, name="patient") as opened:
        assert isinstance(opened, TimedSession)
        opened.probe_seconds = 0.1

        await opened.execute("select pg_sleep(0.5)")


async def test_a_silent_server_is_store_unavailable_after_the_deadline_and_the_session_is_replaced(
    tables_url: str,
) -> None:
    async with Proxy(tables_url) as server:
        pool = make_pool(server.url, name="patient", size=1)
        await pool.open(wait=True)
        async with session(pool) as opened:
            assert isinstance(opened, TimedSession)
            opened.answer_seconds = 0.2
        server.freeze()
        with pytest.raises(StoreUnavailable):
            async with session(pool) as opened:
                await opened.execute("select 1")
        assert opened.closed
        server.thaw()

        async with session(pool) as another:
            assert another is not opened
        await pool.close()


async def test_a_task_cancelled_while_the_pool_checks_its_sessions_ends(tables_url: str) -> None:
    pool = make_pool(tables_url, name="cut", size=2)
    await pool.open(wait=True)
    looking, forever = asyncio.Event(), asyncio.Event()

    async def look_at_a_session_that_does_not_answer(_: object) -> None:
        looking.set()
        await forever.wait()

    pool.check_connection = look_at_a_session_that_does_not_answer  # type: ignore[method-assign, assignment]

    async def use_again_and_again() -> None:
        while True:
            with suppress(StoreUnavailable):
                async with session(pool) as opened:
                    await opened.execute("select pg_terminate_backend(pg_backend_pid())")
            await forever.wait()

    using = asyncio.create_task(use_again_and_again())
    await asyncio.wait_for(looking.wait(), 20)
    using.cancel()
    await asyncio.wait({using}, timeout=DEADLINE_SECONDS)

    assert using.cancelled()
    await pool.close()


@pytest.mark.parametrize("is_translated_within", [False, True])
async def test_a_session_of_a_read_only_server_is_not_kept(tables_url: str, is_translated_within: bool) -> None:
    pool = make_pool(tables_url, name="demoted", size=1)
    await pool.open(wait=True)

    async def write() -> None:
        async with session(pool) as opened:
            with translated() if is_translated_within else nullcontext():
                await opened.execute("delete from email_log")

    async with session(pool) as opened:
        await opened.execute("set default_transaction_read_only = on")  # simulates a server whose default is read-only

    with pytest.raises(StoreUnavailable, match="read-only"):
        await write()
    await write()

    await pool.close()


async def take_steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
AN_ID = uuid4()
AN_INSTANT = datetime(2026, 5, 4, 3, 2, 1, 987654, UTC)


@pytest.fixture
def connection(tables_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(tables_url, autocommit=True) as opened:
        opened.adapters.register_dumper(list, BatchDumper)
        yield opened


def round_trip(connection: psycopg.Connection[Any], items: list[Any], kind: str) -> Any:
    (row,) = connection.execute(f"select %s::{kind}", [items]).fetchall()
    return row[0]


LISTS: list[tuple[list[Any], str]] = [
    ([AN_ID, None, uuid4()], "uuid[]"),
    ([1, -(2**62), None], "bigint[]"),
    ([1.5, 1e-300, float("inf"), None, 0.1 + 0.2], "double precision[]"),
    ([AN_INSTANT, None], "timestamptz[]"),
    (["NULL", None, "", "{}", 'a"b', "a\\b", "a,b", " \n\t", "ä🎉"], "text[]"),
    ([None, None], "text[]"),
    ([], "text[]"),
    ([b"\x00\xff", None], "bytea[]"),
    ([True, False], "boolean[]"),
    ([["a", "b"], ["c", "d"]], "text[]"),
]


def test_every_kind_of_list_survives_a_round_trip(connection: psycopg.Connection[Any]) -> None:
    for items, kind in LISTS:
        assert round_trip(connection, items, kind) == items


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.none() | TEXTS, max_size=8))
def test_every_text_survives_a_round_trip(connection: psycopg.Connection[Any], items: list[str | None]) -> None:
    assert round_trip(connection, items, "text[]") == items


@pytest.mark.parametrize("value", ["ann\0b", ["ann\0b"]])
def test_a_nul_is_refused_and_neither_truncates_the_text_nor_shows_it(
    connection: psycopg.Connection[Any], value: str | list[str]
) -> None:
    with pytest.raises(ValueRefused) as raised, translated():
        connection.execute("select %s", [value])

    assert "ann" not in str(raised.value)
