"""Tests the connections that `enqueue` accepts, and its errors for connections that it cannot use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
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
    """An SQLAlchemy engine that uses psycopg."""
    made = sqlalchemy.create_engine(over("psycopg", tables_url))
    yield made
    made.dispose()


@pytest.fixture
async def async_engine(tables_url: str) -> AsyncIterator[AsyncEngine]:
    """An asynchronous SQLAlchemy engine that uses psycopg."""
    made = create_async_engine(over("psycopg", tables_url))
    yield made
    await made.dispose()


@pytest.fixture
def django(tables_url: str) -> Iterator[Any]:
    """A Django connection that has not connected yet."""
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


SYNCHRONOUS: list[Callable[[sqlalchemy.Engine], Any]] = [
    lambda engine: engine.connect(),
    Session,
    lambda engine: scoped_session(sessionmaker(engine)),
]
ASYNCHRONOUS: list[Callable[[AsyncEngine], Any]] = [
    lambda engine: engine.connect(),
    AsyncSession,
]


@pytest.mark.parametrize("make", SYNCHRONOUS, ids=["connection", "session", "scoped session"])
def test_sqlalchemys_commit_and_rollback_decide_even_if_nothing_was_executed_before(
    engine: sqlalchemy.Engine, books: Books, make: Callable[[sqlalchemy.Engine], Any]
) -> None:
    given = make(engine)
    try:
        enqueue(given, email("kept", attachments=[FILE]))
        assert books.rows() == []
        given.commit()
        assert enqueue(given, email("kept", attachments=[FILE])).acceptance is Acceptance.KNOWN
        enqueue_many(given, [email("undone")])
        given.rollback()
    finally:
        given.close()

    assert [row["message_key"] for row in books.rows()] == ["kept"]


@pytest.mark.parametrize("make", ASYNCHRONOUS, ids=["connection", "session"])
async def test_commit_and_rollback_of_sqlalchemys_async_session_decide_too(
    async_engine: AsyncEngine, books: Books, make: Callable[[AsyncEngine], Any]
) -> None:
    async with make(async_engine) as given:
        await enqueue_async(given, email("kept", attachments=[FILE]))
        assert books.rows() == []
        await given.commit()
        await enqueue_many_async(given, [email("undone")])
        await given.rollback()

    assert [row["message_key"] for row in books.rows()] == ["kept"]


def test_rolling_back_a_savepoint_of_sqlalchemy_removes_its_email(engine: sqlalchemy.Engine, books: Books) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, email("kept"))
        with session.begin_nested() as savepoint:
            enqueue(session, email("undone"))
            savepoint.rollback()

    assert [row["message_key"] for row in books.rows()] == ["kept"]


def test_djangos_connection_connects_at_the_first_enqueue(django: Any, books: Books) -> None:
    enqueue(django, email("first query"))

    assert [row["message_key"] for row in books.rows()] == ["first query"]


def end_session(url: str, session: int) -> None:
    """Terminate the session, as a restart of PostgreSQL would."""
    with psycopg.connect(url, autocommit=True) as administrator:
        administrator.execute("select pg_terminate_backend(%s, 5000)", (session,))


def test_a_persistent_django_connection_that_was_lost_is_replaced_at_the_next_call(
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

    assert [row["message_key"] for row in books.rows()] == ["first", "second"]


def test_django_checks_a_persistent_connection_before_the_first_enqueue(
    django: Any, tables_url: str, books: Books
) -> None:
    enqueue(django, email("first"))
    end_session(tables_url, django.connection.info.backend_pid)
    django.settings_dict["CONN_HEALTH_CHECKS"] = django.health_check_enabled = True
    django.health_check_done = False  # as Django does at the start of a request

    enqueue(django, email("second"))

    assert [row["message_key"] for row in books.rows()] == ["first", "second"]


def test_djangos_atomic_commits_and_rolls_back_the_email(django: Any, books: Books) -> None:
    from django.db import transaction

    with transaction.atomic(using="here"):
        enqueue(django, email("kept", attachments=[FILE]))
        assert books.rows() == []
    with transaction.atomic(using="here"):
        enqueue(django, email("undone"))
        transaction.set_rollback(True, using="here")

    assert [row["message_key"] for row in books.rows()] == ["kept"]


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


async def test_an_asynchronous_connection_is_refused_with_the_async_function_to_use(
    async_engine: AsyncEngine, tables_url: str
) -> None:
    instead = "which is asynchronous. Write `await enqueue_async(connection, email)`."
    async with (
        await psycopg.AsyncConnection.connect(tables_url) as connection,
        AsyncSession(async_engine) as session,
        async_engine.connect() as other,
    ):
        assert refused(connection) == f"enqueue was given a psycopg.AsyncConnection, {instead}"
        assert refused(session) == f"enqueue was given a {AsyncSession.__module__}.AsyncSession, {instead}"
        assert refused(other) == f"enqueue was given a {AsyncConnection.__module__}.AsyncConnection, {instead}"
        assert await session.run_sync(refused) == f"enqueue was given a psycopg.AsyncConnection, {instead}"


async def test_a_synchronous_connection_is_refused_with_the_sync_function_to_use(
    engine: sqlalchemy.Engine, django: Any, tables_url: str
) -> None:
    instead = (
        "which is synchronous and would stop the event loop. "
        "Write `enqueue(connection, email)` in a function, and run it in a thread (`asyncio.to_thread`)."
    )
    with psycopg.connect(tables_url) as connection, Session(engine) as session, engine.connect() as other:
        assert await refused_async(connection) == f"enqueue_async was given a psycopg.Connection, {instead}"
        assert await refused_async(session) == f"enqueue_async was given a sqlalchemy.orm.session.Session, {instead}"
        assert await refused_async(other) == f"enqueue_async was given a sqlalchemy.engine.base.Connection, {instead}"
        assert await refused_async(django) == f"enqueue_async was given a Django connection, {instead}"


async def test_another_driver_is_named_with_what_to_use_instead(tables_url: str) -> None:
    instead = "which is not a connection that enqueue can use. Pass a psycopg 3 connection, Django's `connection`, or"
    other = await asyncpg.connect(tables_url)
    try:
        assert instead in refused(other)
        assert (await refused_async(other)).startswith("enqueue_async was given an asyncpg.connection.Connection, ")
    finally:
        await other.close()
    opened = psycopg2.connect(tables_url)
    try:
        assert instead in refused(opened)
    finally:
        opened.close()
    with psycopg.connect(tables_url) as connection, connection.cursor() as cursor:
        assert instead in refused(cursor)
    assert instead in refused(None)
    assert instead in refused(email("the connection and the email are the wrong way round"))


async def test_sqlalchemy_over_another_driver_gets_an_error_with_the_url_to_use(tables_url: str) -> None:
    instead = "but enqueue needs psycopg 3. Start the engine's URL with postgresql+psycopg://."
    engine = sqlalchemy.create_engine(over("psycopg2", tables_url))
    async_engine = create_async_engine(over("asyncpg", tables_url))
    with Session(engine) as session:
        assert (
            refused(session) == f"The sqlalchemy.orm.session.Session uses a psycopg2.extensions.connection, {instead}"
        )
    async with AsyncSession(async_engine) as async_session:
        name = f"{AsyncSession.__module__}.AsyncSession"
        assert await refused_async(async_session) == f"The {name} uses an asyncpg.connection.Connection, {instead}"
    engine.dispose()
    await async_engine.dispose()


async def test_a_pool_is_not_a_connection(
    engine: sqlalchemy.Engine, async_engine: AsyncEngine, tables_url: str
) -> None:
    from django.db import connections

    why = "which is not a connection, so it has no transaction for the email."
    with ConnectionPool(tables_url, open=False) as pool:
        assert refused(pool).endswith(
            f"{why} Write `with pool.connection() as connection: enqueue(connection, email)`."
        )
    async with AsyncConnectionPool(tables_url, open=False) as async_pool:
        assert "async with pool.connection() as connection: await enqueue_async" in await refused_async(async_pool)
    assert "with engine.begin() as connection: enqueue(connection, email)" in refused(engine)
    assert "async with engine.begin() as connection: await enqueue_async" in await refused_async(async_engine)
    assert "with factory.begin() as session: enqueue(session, email)" in refused(sessionmaker(engine))
    assert 'enqueue(connections["default"], email)' in refused(connections)


def test_a_url_is_refused_and_not_quoted() -> None:
    assert refused("postgresql://shop:secret@db/shop") == (
        "enqueue was given a str, which is not a connection. "
        "Open one: `with psycopg.connect(…) as connection: enqueue(connection, email)`."
    )


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
        assert "An earlier statement of the connection" in refused(connection)
        assert "Roll back, then enqueue" in refused(connection)
        connection.rollback()
        enqueue(connection, email("sync"))
    async with await psycopg.AsyncConnection.connect(tables_url) as async_connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await async_connection.execute("select 1 / 0")
        assert "An earlier statement of the connection" in await refused_async(async_connection)
        await async_connection.rollback()
        await enqueue_async(async_connection, email("async"))

    assert {row["message_key"] for row in books.rows()} == {"sync", "async"}


async def test_djangos_error_for_a_connection_of_another_thread_is_unchanged(django: Any) -> None:
    from django.db import DatabaseError

    with pytest.raises(DatabaseError, match="can only be used in that same thread"):
        await asyncio.to_thread(enqueue, django, email("key"))


def test_djangos_error_for_a_broken_transaction_is_unchanged(django: Any, books: Books) -> None:
    from django.db import transaction

    with transaction.atomic(using="here"):
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="here", savepoint=False):
            raise ZeroDivisionError
        with pytest.raises(transaction.TransactionManagementError, match="until the end of the 'atomic' block"):
            enqueue(django, email("key"))

    assert books.rows() == []


async def test_a_database_without_tables_gets_an_error_that_names_init(empty_database_url: str) -> None:
    name = urlsplit(empty_database_url).path[1:]
    words = (
        f'The database "{name}" does not have this release\'s tables of the email dispatcher in the schema '
        '"dispatcher". Run `dispatcher init`'
    )
    with psycopg.connect(empty_database_url) as connection, pytest.raises(SchemaError) as missing:
        enqueue(connection, email("key"))
    assert str(missing.value).startswith(words)
    async with await psycopg.AsyncConnection.connect(empty_database_url) as async_connection:
        with pytest.raises(SchemaError) as missing:
            await enqueue_async(async_connection, email("key"))
    assert str(missing.value).startswith(words)


async def test_psycopgs_error_for_a_missing_table_of_the_application_is_not_translated(
    tables_url: str,
) -> None:
    with psycopg.connect(tables_url) as connection:

        def emails() -> Iterator[Any]:
            connection.execute("select from orders")
            yield email("key")

        with pytest.raises(psycopg.errors.UndefinedTable):
            enqueue_many(connection, emails())
