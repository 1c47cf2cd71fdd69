"""Finds the psycopg connection inside the connection that an application passes to `enqueue`.

Applications pass a psycopg connection, Django's `connection`, a SQLAlchemy Connection or Session, or the asynchronous
variant of one of these. Each contains a psycopg connection, in the caller's transaction. This module imports neither
Django nor SQLAlchemy. A caller that passes an object of one of these packages has already imported the package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from dispatcher.errors import SchemaError, UnusableConnection
from dispatcher.store.queries import schema


class DjangoConnection(Protocol):
    """The part of Django's connections (`django.db.connection`) that `enqueue` uses."""

    connection: Any

    def ensure_connection(self) -> None: ...
    def validate_no_broken_transaction(self) -> None: ...


class SqlAlchemyConnection(Protocol):
    """The part of `sqlalchemy.Connection` that `enqueue` uses."""

    @property
    def connection(self) -> Any: ...
    def in_transaction(self) -> bool: ...


class SqlAlchemySession(Protocol):
    """The part of `sqlalchemy.orm.Session` and `scoped_session` that `enqueue` uses."""

    def connection(self) -> SqlAlchemyConnection: ...


class AsyncSqlAlchemyConnection(Protocol):
    """The part of `sqlalchemy.ext.asyncio.AsyncConnection` that `enqueue_async` uses."""

    def in_transaction(self) -> bool: ...
    async def get_raw_connection(self) -> Any: ...


class AsyncSqlAlchemySession(Protocol):
    """The part of `sqlalchemy.ext.asyncio.AsyncSession` and `async_scoped_session` that `enqueue_async` uses."""

    async def connection(self) -> AsyncSqlAlchemyConnection: ...


CallersConnection = psycopg.Connection[Any] | DjangoConnection | SqlAlchemyConnection | SqlAlchemySession
AsyncCallersConnection = psycopg.AsyncConnection[Any] | AsyncSqlAlchemyConnection | AsyncSqlAlchemySession

_DJANGO: Final = ("django.utils.connection.ConnectionProxy", "django.db.backends.base.base.BaseDatabaseWrapper")
_CONNECTION: Final = "sqlalchemy.Connection"
_SESSIONS: Final = ("sqlalchemy.orm.Session", "sqlalchemy.orm.scoped_session")
_ASYNC_CONNECTION: Final = "sqlalchemy.ext.asyncio.AsyncConnection"
_ASYNC_SESSIONS: Final = ("sqlalchemy.ext.asyncio.AsyncSession", "sqlalchemy.ext.asyncio.async_scoped_session")
_SYNCHRONOUS: Final = ("psycopg.Connection", *_DJANGO, _CONNECTION, *_SESSIONS)
_ASYNCHRONOUS: Final = ("psycopg.AsyncConnection", _ASYNC_CONNECTION, *_ASYNC_SESSIONS)
_POOLS: Final = {
    ("psycopg_pool.ConnectionPool",): "with pool.connection() as connection: enqueue(connection, email)",
    ("psycopg_pool.AsyncConnectionPool",): (
        "async with pool.connection() as connection: await enqueue_async(connection, email)"
    ),
    ("sqlalchemy.Engine",): "with engine.begin() as connection: enqueue(connection, email)",
    ("sqlalchemy.ext.asyncio.AsyncEngine",): (
        "async with engine.begin() as connection: await enqueue_async(connection, email)"
    ),
    ("sqlalchemy.orm.sessionmaker",): "with factory.begin() as session: enqueue(session, email)",
    ("sqlalchemy.ext.asyncio.async_sessionmaker",): (
        "async with factory.begin() as session: await enqueue_async(session, email)"
    ),
    ("django.db.utils.ConnectionHandler",): 'enqueue(connections["default"], email)',
}
"""Connection pools and factories. `enqueue` does not accept them. Each value is what the caller must write instead."""


def connection_of(given: CallersConnection) -> psycopg.Connection[Any]:
    """The psycopg connection inside the argument of `enqueue`, in the caller's transaction. Raises
    UnusableConnection."""
    is_drivers = isinstance(given, (psycopg.Connection, psycopg.AsyncConnection))
    driver: object = given if is_drivers else _driver_of(given)
    # Inside SQLAlchemy's `run_sync`, SQLAlchemy's synchronous connection contains an asynchronous psycopg connection.
    if isinstance(driver, psycopg.AsyncConnection):
        raise _refusal(driver, "enqueue", _ASYNCHRONOUS)
    if not isinstance(driver, psycopg.Connection):
        raise _other_driver(given, driver)
    _check(driver)
    return driver


async def async_connection_of(given: AsyncCallersConnection) -> psycopg.AsyncConnection[Any]:
    """As `connection_of`, for the argument of `enqueue_async`."""
    driver: object = given if isinstance(given, psycopg.AsyncConnection) else await _async_driver_of(given)
    if not isinstance(driver, psycopg.AsyncConnection):
        raise _other_driver(given, driver)
    _check(driver)
    return driver


def _driver_of(given: Any) -> object:
    if _is(given, *_DJANGO):
        given.validate_thread_sharing()
        given.validate_no_broken_transaction()
        # Django detects a lost connection only by the errors of its own queries, and our queries bypass Django. So
        # check here whether the connection is closed.
        if given.connection is not None and given.connection.closed and given.get_autocommit():
            given.close()
        # Make the two calls that Django itself makes before each query.
        given.close_if_health_check_failed()
        given.ensure_connection()
        return given.connection
    if _is(given, *_SESSIONS):
        given = given.connection()
    elif not _is(given, _CONNECTION):
        raise _refusal(given, "enqueue", _ASYNCHRONOUS)
    _check_open(given)
    if not given.in_transaction():
        # SQLAlchemy begins a transaction at its own first statement, and our statement bypasses SQLAlchemy. Without a
        # transaction, the caller's commit() would do nothing.
        given.begin()
    return given.connection.driver_connection


async def _async_driver_of(given: Any) -> object:
    if _is(given, *_ASYNC_SESSIONS):
        given = await given.connection()
    elif not _is(given, _ASYNC_CONNECTION):
        raise _refusal(given, "enqueue_async", _SYNCHRONOUS)
    _check_open(given)
    if not given.in_transaction():
        await given.begin()
    return (await given.get_raw_connection()).driver_connection


def _check(driver: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    _check_open(driver)
    if driver.pgconn.transaction_status == TransactionStatus.INERROR:
        raise UnusableConnection(
            "An earlier statement of the connection's transaction failed, so PostgreSQL refuses every other statement.",
            remedy="Roll back, then enqueue. Put statements that may fail into a savepoint: psycopg's "
            "`connection.transaction()`, Django's `atomic()`, or SQLAlchemy's `begin_nested()`.",
        )


def _check_open(connection: Any) -> None:
    if connection.closed:
        raise UnusableConnection(
            f"The {_name(connection)} is closed.", remedy="Enqueue before you close it, or on another connection."
        )


def _refusal(given: object, call: str, types_of_other_call: tuple[str, ...]) -> UnusableConnection:
    """The error for an argument that `call` cannot use. The remedy says what to write instead: for
    `types_of_other_call`, the other of `enqueue` and `enqueue_async`."""
    what = f"{call} was given {_article(given)} {_name(given)}"
    if _is(given, *types_of_other_call):
        if call == "enqueue":
            why, instead = "which is asynchronous", "`await enqueue_async(connection, email)`"
        else:
            why = "which is synchronous and would stop the event loop"
            instead = "`enqueue(connection, email)` in a function, and run it in a thread (`asyncio.to_thread`)"
        return UnusableConnection(f"{what}, {why}.", remedy=f"Write {instead}.")
    if isinstance(given, str | bytes):
        instead = "with psycopg.connect(…) as connection: enqueue(connection, email)"
        return UnusableConnection(f"{what}, which is not a connection.", remedy=f"Open one: `{instead}`.")
    for names, instead in _POOLS.items():
        if _is(given, *names):
            why = "which is not a connection, so it has no transaction for the email"
            return UnusableConnection(f"{what}, {why}.", remedy=f"Write `{instead}`.")
    return UnusableConnection(f"{what}, which is not a connection that {call} can use.", remedy=_WHAT_WORKS)


_WHAT_WORKS: Final = (
    "Pass a psycopg 3 connection, Django's `connection`, or a SQLAlchemy Connection or Session over "
    "postgresql+psycopg://. With another driver, send through the HTTP API (`dispatcher.client`)."
)


def _other_driver(given: object, driver: object) -> UnusableConnection:
    if _is(given, *_DJANGO):
        remedy = "Set ENGINE to django.db.backends.postgresql, and install psycopg 3 instead of psycopg2."
    else:
        remedy = "Start the engine's URL with postgresql+psycopg://."
    why = "but enqueue needs psycopg 3"
    return UnusableConnection(f"The {_name(given)} uses {_article(driver)} {_name(driver)}, {why}.", remedy=remedy)


def _is(given: object, *names: str) -> bool:
    """Whether the object is an instance of one of these classes. Does not import them: if the module of a class is not
    loaded, no instance of the class exists."""
    for name in names:
        module, _, kind = name.rpartition(".")
        found = getattr(sys.modules.get(module), kind, None)
        if isinstance(found, type) and isinstance(given, found):
            return True
    return False


def _name(given: object) -> str:
    if _is(given, *_DJANGO):
        return "Django connection"
    kind = type(given)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _article(given: object) -> str:
    return "an" if _name(given)[0] in "aeiou" else "a"


@contextmanager
def with_tables(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> Iterator[None]:
    """Translates PostgreSQL's errors about missing tables or rights, raised in the block, into SchemaError or
    UnusableConnection with a remedy."""
    try:
        yield
    except (pg.UndefinedTable, pg.UndefinedColumn, pg.UndefinedFunction, pg.InvalidSchemaName) as error:
        raise SchemaError(
            f'The database "{connection.info.dbname}" does not have this release\'s tables of the email dispatcher in '
            f'the schema "{schema()}".',
            remedy="Run `dispatcher init` with this database in DISPATCHER_DATABASE_URL, connect to the database that "
            "has the tables, or give DISPATCHER_DATABASE_SCHEMA the dispatcher's value in this application, too.",
        ) from error
    except pg.InsufficientPrivilege as error:
        raise UnusableConnection(
            f'The role "{connection.info.user}" may not enqueue: {error.diag.message_primary}.',
            remedy="As the owner of the tables, execute the statements that "
            "`dispatcher topology grants --producer ROLE` prints.",
        ) from error
