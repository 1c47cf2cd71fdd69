"""Tests the connections that `enqueue` accepts, and its errors for connections that it cannot use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from dispatcher import (
    Acceptance,
    Attachment,
    SchemaError,
    UnusableConnection,
    enqueue,
    enqueue_async,
    enqueue_many,
    enqueue_many_async,
)
from tests.store.books import Books, email

FILE = Attachment("a.bin", "application/octet-stream", bytes(range(256)))


def over(driver: str, url: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


@pytest.fixture
def engine(tables_url: str) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(over("psycopg", tables_url))
    yield made
    made.dispose()


@pytest.fixture
async def async_engine(tables_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(over("psycopg", tables_url))
    yield made
    await made.dispose()


@pytest.fixture
def django(tables_url: str) -> Iterator[Any]:
    from django.conf import settings

    if not settings.configured:
        settings.configure()
    from django.db import connections

    parts = urlsplit(tables_url)
    where = {"NAME": parts.path[1:], "USER": parts.username, "PASSWORD": parts.password, "HOST": parts.hostname}
    database = {"ENGINE": "django.db.backends.postgresql", **where, "PORT": parts.port}
    connections.settings = connections.configure_settings({"default": {}, "here": database})
    yield connections["here"]
    connections["here"].close()
    del connections["here"]


def keys(books: Books) -> list[str]:
    return [row["message_key"] for row in books.rows()]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda engine: engine.connect(), id="connection"),
        pytest.param(Session, id="session"),
        pytest.param(lambda engine: scoped_session(sessionmaker(engine)), id="scoped session"),
    ],
)
def test_sqlalchemys_commit_and_rollback_decide_even_if_nothing_was_executed_before(
    engine: sqlalchemy.Engine, books: Books, make: Callable[[sqlalchemy.Engine], Any]
) -> None:
    given = make(engine)
    try:
        enqueue(given, email("kept", attachments=[FILE]))
        assert keys(books) == []
        given.commit()
        assert enqueue(given, email("kept", attachments=[FILE])).acceptance is Acceptance.KNOWN
        enqueue_many(given, [email("undone")])
        given.rollback()
    finally:
        given.close()

    assert keys(books) == ["kept"]


@pytest.mark.parametrize("make", [AsyncEngine.connect, AsyncSession], ids=["connection", "session"])
async def test_commit_and_rollback_of_sqlalchemys_async_session_decide_too(
    async_engine: AsyncEngine, books: Books, make: Callable[[AsyncEngine], Any]
) -> None:
    async with make(async_engine) as given:
        await enqueue_async(given, email("kept", attachments=[FILE]))
        assert keys(books) == []
        await given.commit()
        await enqueue_many_async(given, [email("undone")])
        await given.rollback()

    assert keys(books) == ["kept"]


def end_session(url: str, session: int) -> None:
    with psycopg.connect(url, autocommit=True) as administrator:
        administrator.execute("select pg_terminate_backend(%s, 5000)", (session,))


def test_a_persistent_django_connection_that_was_lost_is_replaced_at_the_next_call_or_by_djangos_health_check(
    django: Any, tables_url: str, books: Books
) -> None:
    from django.db import transaction

    enqueue(django, email("first"))
    end_session(tables_url, django.connection.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        enqueue(django, email("lost"))
    enqueue(django, email("second"))
    with suppress(UnusableConnection), transaction.atomic(django.alias):
        enqueue(django, email("undone"))
        end_session(tables_url, django.connection.info.backend_pid)
        with suppress(psycopg.OperationalError):
            enqueue(django, email("lost"))
        with pytest.raises(UnusableConnection, match="is closed") as raised:
            enqueue(django, email("not in another transaction"))
        raise raised.value

    assert keys(books) == ["first", "second"]
    end_session(tables_url, django.connection.info.backend_pid)
    django.settings_dict["CONN_HEALTH_CHECKS"] = django.health_check_enabled = True
    django.health_check_done = False  # as Django does at the start of a request
    enqueue(django, email("third"))
    assert keys(books) == ["first", "second", "third"]


def test_djangos_atomic_commits_and_rolls_back_the_email(django: Any, books: Books) -> None:
    from django.db import transaction

    with transaction.atomic(using="here"):
        enqueue(django, email("kept", attachments=[FILE]))
        assert keys(books) == []
    with transaction.atomic(using="here"):
        enqueue(django, email("undone"))
        transaction.set_rollback(True, using="here")

    assert keys(books) == ["kept"]


def test_django_sqlalchemy_and_their_drivers_are_not_imported(tables_url: str) -> None:
    program = """
import sys, psycopg
from dispatcher import Email, enqueue
with psycopg.connect(sys.argv[1]) as connection:
    enqueue(connection, Email(message_key="key", sender="a@example.com", to="b@example.org", subject="Hi", text="Hi"))
print({"django", "sqlalchemy", "asyncpg", "psycopg2", "psycopg_pool"} & sys.modules.keys())
"""
    ended = subprocess.run([sys.executable, "-c", program, tables_url], check=True, capture_output=True, text=True)

    assert ended.stdout == "set()\n"


def refused(given: Any) -> str:
    with pytest.raises(UnusableConnection) as refusal:
        enqueue(given, email("key"))
    return str(refusal.value)


async def refused_async(given: Any) -> str:
    with pytest.raises(UnusableConnection) as refusal:
        await enqueue_async(given, email("key"))
    return str(refusal.value)


async def test_a_connection_of_the_other_kind_is_refused_with_the_function_to_use(
    engine: sqlalchemy.Engine, async_engine: AsyncEngine, django: Any, tables_url: str
) -> None:
    async with (
        await psycopg.AsyncConnection.connect(tables_url) as connection,
        AsyncSession(async_engine) as session,
        async_engine.connect() as other,
    ):
        instead = "psycopg.AsyncConnection, which is asynchronous. Write `await enqueue_async(connection, email)`."
        assert all(instead.partition(", ")[2] in refused(each) for each in (connection, session, other))
        assert instead in await session.run_sync(refused)
    with psycopg.connect(tables_url) as given, Session(engine) as session_given, engine.connect() as other_given:
        for each in (given, session_given, other_given, django):
            assert "which is synchronous" in await refused_async(each)


async def test_another_driver_is_named_with_what_to_use_instead(tables_url: str) -> None:
    instead = "which is not a connection that enqueue can use. Pass a psycopg 3 connection, Django's `connection`, or"
    other = await asyncpg.connect(tables_url)
    assert instead in refused(other)
    assert (await refused_async(other)).startswith("enqueue_async was given an asyncpg.connection.Connection, ")
    await other.close()
    with closing(psycopg2.connect(tables_url)) as opened, psycopg.connect(tables_url) as connection:
        for each in (opened, connection.cursor(), None, email("the connection and the email are the wrong way round")):
            assert instead in refused(each)
    words = refused("postgresql://shop:secret@db/shop")
    assert "with psycopg.connect(…) as connection" in words
    assert "secret" not in words


async def test_sqlalchemy_over_another_driver_gets_an_error_with_the_url_to_use(tables_url: str) -> None:
    instead = "Start the engine's URL with postgresql+psycopg://."
    engine = sqlalchemy.create_engine(over("psycopg2", tables_url))
    async_engine = create_async_engine(over("asyncpg", tables_url))
    async with AsyncSession(async_engine) as async_session:
        with Session(engine) as session:
            assert instead in refused(session)
        assert instead in await refused_async(async_session)
    engine.dispose()
    await async_engine.dispose()


async def test_a_pool_is_no_connection(engine: sqlalchemy.Engine, async_engine: AsyncEngine, tables_url: str) -> None:
    from django.db import connections

    with ConnectionPool(tables_url, open=False) as pool:
        assert "with pool.connection() as connection: enqueue(connection, email)" in refused(pool)
    async with AsyncConnectionPool(tables_url, open=False) as async_pool:
        assert "async with pool.connection() as connection: await enqueue_async" in await refused_async(async_pool)
    assert "with engine.begin() as connection: enqueue(connection, email)" in refused(engine)
    assert "async with engine.begin() as connection: await enqueue_async" in await refused_async(async_engine)
    assert "with factory.begin() as session: enqueue(session, email)" in refused(sessionmaker(engine))
    assert 'enqueue(connections["default"], email)' in refused(connections)


async def test_a_closed_connection_is_named(
    engine: sqlalchemy.Engine, async_engine: AsyncEngine, tables_url: str
) -> None:
    with psycopg.connect(tables_url) as connection, engine.connect() as other:
        pass
    async with async_engine.connect() as async_other:
        pass
    instead = "is closed. Enqueue before you close it, or on another connection."

    assert refused(connection) == f"The psycopg.Connection {instead}"
    assert refused(other) == f"The sqlalchemy.engine.base.Connection {instead}"
    assert instead in await refused_async(async_other)


async def test_a_failed_transaction_has_to_be_rolled_back_first(tables_url: str, books: Books) -> None:
    with psycopg.connect(tables_url) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1 / 0")
        for words in ("An earlier statement of the connection", "Roll back, then enqueue"):
            assert words in refused(connection)
        connection.rollback()
        enqueue(connection, email("sync"))
    async with await psycopg.AsyncConnection.connect(tables_url) as async_connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await async_connection.execute("select 1 / 0")
        assert "An earlier statement of the connection" in await refused_async(async_connection)
        await async_connection.rollback()
        await enqueue_async(async_connection, email("async"))

    assert set(keys(books)) == {"sync", "async"}


async def test_a_database_without_tables_gets_an_error_that_names_init(empty_database_url: str) -> None:
    words = "Run `dispatcher init`"
    with psycopg.connect(empty_database_url) as connection, pytest.raises(SchemaError, match=words):
        enqueue(connection, email("key"))
    async with await psycopg.AsyncConnection.connect(empty_database_url) as async_connection:
        with pytest.raises(SchemaError, match=words):
            await enqueue_async(async_connection, email("key"))


async def test_psycopgs_error_for_a_missing_table_of_the_application_is_not_translated(tables_url: str) -> None:
    with psycopg.connect(tables_url) as connection:

        def emails() -> Iterator[Any]:
            connection.execute("select from orders")
            yield email("key")

        with pytest.raises(psycopg.errors.UndefinedTable):
            enqueue_many(connection, emails())
