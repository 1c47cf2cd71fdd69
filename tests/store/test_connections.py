"""Tests session settings, translated errors, and sessions on frozen, restarted or read-only servers."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from dispatcher.errors import (
    DispatcherError,
    SchemaError,
    StatementRefused,
    StoreRefused,
    StoreTooSlow,
    StoreUnavailable,
    ValueRefused,
)
from dispatcher.store.connections import (
    PROBE_SECONDS,
    Pool,
    TimedSession,
    connect_async,
    connected,
    make_pool,
    session,
    translated,
)
from dispatcher.store.leases import LeaseStore
from dispatcher.store.statements import fetch
from tests.broker.proxy import Proxy
from tests.store.books import Books
from tests.waiting import DEADLINE_SECONDS, until


async def test_a_commit_waits_for_the_disk_and_every_other_wait_has_a_timeout(tables_url: str) -> None:
    opened = await connect_async(tables_url, name="some name")

    async def show(setting: str) -> str:
        row = await (await opened.execute("select current_setting(%s)", [setting])).fetchone()
        assert row is not None
        return str(row[0])

    shown = {name: await show(name) for name in ("synchronous_commit", "statement_timeout", "lock_timeout")}
    assert shown == {"synchronous_commit": "on", "statement_timeout": "30s", "lock_timeout": "10s"}
    assert await show("application_name") == "some name"
    assert opened.autocommit
    await opened.close()


async def test_a_plan_made_for_few_emails_does_not_scan_the_table(tables_url: str, books: Books) -> None:
    """PostgreSQL would keep a plan with a table scan even while the table grows to a million emails."""
    (email_id, *_) = books.enqueue(20)
    opened = await connect_async(tables_url, name="some name")
    await opened.execute("analyze email_log")
    cursor = await opened.execute(
        "explain select from unnest(%(ids)s::uuid[]) as w (id) join email_log on email_id = w.id"
        " and email_id between %(id)s and %(id)s",
        {"ids": [email_id], "id": email_id},
    )
    plan = "\n".join(row[0] for row in await cursor.fetchall())
    await opened.close()

    assert "Seq Scan on email_log" not in plan


async def test_text_arrives_unchanged_whatever_encoding_the_environment_sets(
    tables_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    opened = await connect_async(tables_url, name="some name")
    (row,) = await (await opened.execute("select %s::text[], %s::text", [["é", "日本"], "日本"])).fetchall()
    await opened.close()
    with connected(tables_url) as simple:
        (plain,) = simple.execute("select %s::text", ["日本"]).fetchall()

    assert row == (["é", "日本"], "日本")
    assert plain == ("日本",)


async def test_the_server_is_set_to_notice_a_vanished_client(tables_url: str, pool: Pool) -> None:
    async with session(pool) as opened:
        rows = await (
            await opened.execute("select name, setting::integer from pg_settings where name like 'tcp\\_%'")
        ).fetchall()

    assert dict(rows) == {
        "tcp_keepalives_idle": 5,
        "tcp_keepalives_interval": 3,
        "tcp_keepalives_count": 3,
        "tcp_user_timeout": 15_000,
    }


def test_a_refused_connection_is_store_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="not available"), connected("postgresql://nobody@127.0.0.1:1/nothing"):
        pass


def test_a_wrong_password_is_store_unavailable_and_is_not_repeated(tables_url: str) -> None:
    url = tables_url.replace(":", ":wrong", 2).replace(":wrong", ":", 1)

    with pytest.raises(StoreUnavailable) as told, connected(url):
        pass

    assert "wrong" not in str(told.value)


async def test_a_pool_with_an_unreachable_server_raises_in_time() -> None:
    pool = make_pool("postgresql://nobody@127.0.0.1:1/nothing", name="x", size=1)
    pool.timeout = 0.2
    await pool.open()

    with pytest.raises(StoreUnavailable):
        async with session(pool):
            pass

    await pool.close()


async def test_a_pool_whose_login_is_refused_raises_the_cause_and_a_remedy(tables_url: str) -> None:
    pool = make_pool(tables_url.replace(":", ":wrong", 2).replace(":wrong", ":", 1), name="x", size=1)
    pool.timeout = 1
    await pool.open()

    with pytest.raises(StoreRefused, match=r"password authentication failed.*Correct the user and password"):
        async with session(pool):
            pass

    await pool.close()


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("select * from no_such_table", SchemaError),
        ("select no_such_function()", SchemaError),
        ("set statement_timeout = 1; select pg_sleep(5)", StoreTooSlow),
        ("select pg_terminate_backend(pg_backend_pid())", StoreUnavailable),
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


def test_errors_of_the_client_library_are_translated_without_values(tables_url: str) -> None:
    with connected(tables_url) as connection, pytest.raises(DispatcherError) as raised, translated():
        connection.execute("select %s::text", ["ann@example.org\0"])

    assert type(raised.value) is ValueRefused
    assert "ann" not in str(raised.value)


async def test_a_pool_recovers_after_all_its_sessions_were_terminated(store: LeaseStore, books: Books) -> None:
    keys = books.keys(books.enqueue(1))
    faults: list[StoreUnavailable] = []

    await until(lambda: len(books.sessions("worker-1")) == 2)
    assert books.terminate("worker-1") == 2
    leases: list[Any] = []
    while not leases:
        try:
            leases = await store.lease(keys, 60)
        except StoreUnavailable as fault:
            faults.append(fault)

    assert len(leases) == 1
    assert len(faults) <= 2


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


async def test_a_lock_timeout_is_store_unavailable(
    store: LeaseStore, books: Books, tables_url: str, pool: Pool
) -> None:
    (email_id,) = books.enqueue(1)
    async with session(pool) as first, session(pool) as second:
        for each in (first, second):
            await each.execute("set lock_timeout = '50ms'")

    with psycopg.connect(tables_url) as person:
        Books(person).lock(email_id)
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            await store.lease(books.keys([email_id]), 60)

    assert books.status(email_id) == "pending"


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


async def test_a_silent_server_is_store_unavailable_after_the_deadline(tables_url: str) -> None:
    async with Proxy(tables_url) as server:
        opened = await connect_async(server.url, name="patient")
        assert isinstance(opened, TimedSession)
        opened.answer_seconds = 0.2
        server.freeze()

        with pytest.raises(StoreUnavailable), translated():
            await opened.execute("select 1")

        assert opened.closed


async def test_a_frozen_server_is_store_unavailable_as_soon_as_a_probe_fails(tables_url: str) -> None:
    async with Proxy(tables_url) as server:
        opened = await connect_async(server.url, name="patient")
        assert isinstance(opened, TimedSession)
        opened.probe_seconds = 0.2
        server.freeze_node()

        async with asyncio.timeout(10):  # without the probe, the session would wait for `answer_seconds`
            with pytest.raises(StoreUnavailable), translated():
                await opened.execute("select 1")


@pytest.mark.slow
async def test_a_frozen_server_is_given_up_once_for_all_sessions_of_a_pool(tables_url: str) -> None:
    async with Proxy(tables_url) as server:
        pool = make_pool(server.url, name="patient", size=4)
        await pool.open(wait=True)
        server.freeze_node()

        async with asyncio.timeout(2.5 * PROBE_SECONDS):
            with pytest.raises(StoreUnavailable):
                async with session(pool) as opened:
                    await opened.execute("select 1")

        server.thaw()
        async with session(pool) as another:
            await another.execute("select 1")
        await pool.close()


async def test_a_slow_statement_continues_while_the_server_answers_probes(tables_url: str) -> None:
    opened = await connect_async(tables_url, name="patient")
    assert isinstance(opened, TimedSession)
    opened.probe_seconds = 0.1

    await opened.execute("select pg_sleep(0.5)")

    await opened.close()


async def test_with_several_hosts_in_the_url_the_one_that_answers_is_used(tables_url: str) -> None:
    place = urlsplit(tables_url).netloc.rpartition("@")[2]
    several = f"{tables_url.replace(place, f'127.0.0.1:1,{place}')}?target_session_attrs=read-write"
    pool = make_pool(several, name="several", size=1)
    await pool.open()
    async with session(pool) as pooled:
        await pooled.execute("select 1")
    await pool.close()
    single = await connect_async(several, name="several")
    await single.execute("select 1")
    await single.close()
    with connected(several) as simple:
        simple.execute("select 1")


async def test_a_silent_session_of_the_pool_is_replaced(tables_url: str) -> None:
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
async def test_a_session_opened_while_the_server_was_read_only_is_not_kept(
    tables_url: str, is_translated_within: bool
) -> None:
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
    """Lets the event loop run `count` steps."""
    for _ in range(count):
        await asyncio.sleep(0)
