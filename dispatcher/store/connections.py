"""How we connect to PostgreSQL, and the one border where its errors become ours."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeAlias, TypeVar

import orjson
import psycopg
from psycopg import errors as pg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from psycopg.types.json import set_json_loads

from dispatcher.errors import (
    AnswerTooLarge,
    ConfigurationError,
    SchemaError,
    StatementRefused,
    StoreBusy,
    StoreRefused,
    StoreUnavailable,
    ValueRefused,
)
from dispatcher.store.arrays import BatchDumper
from dispatcher.store.queries import query, schema

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

T = TypeVar("T")

Session = psycopg.Connection[TupleRow]
AsyncSession = psycopg.AsyncConnection[TupleRow]
Pool: TypeAlias = "AsyncConnectionPool[AsyncSession]"

CONNECT_SECONDS: Final = 5
STATEMENT_SECONDS: Final = 30
ANSWER_SECONDS: Final = 45.0
"""After so long a statement gets no answer any more: the server itself ends it after `STATEMENT_SECONDS`."""
DOUBT_SECONDS: Final = 4.0
"""How long a statement waits before the session asks whether its server still answers, and between two such questions.
The server has as long to answer, so that a frozen one is noticed after about twice this time."""
_SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""Any PostgreSQL server, and any pooler before one, answers it with a byte and needs no login (PostgreSQL, 55.7)."""
UNHURRIED_SECONDS: Final = 86_400.0
"""The same where the server ends no statement (see `unhurry`): far above what reading any week takes."""
LOCK_SECONDS: Final = 10
BATCH_LOCK_SECONDS: Final = 2
"""For who writes many emails at once: one row that somebody holds must not keep the others for long."""
_LOGIN_REMEDY: Final = (
    "Correct user and password in DISPATCHER_DATABASE_URL (@ is %40 there, and / is %2F), or set that user's password "
    "in PostgreSQL."
)
_NAME_REMEDY: Final = (
    "Correct the database's name at the end of DISPATCHER_DATABASE_URL, or make that database: "
    "createdb --encoding UTF8 NAME."
)
_GRANTS: Final = "`dispatcher topology grants` prints the rights of each role; execute them as the owner of the tables."
# psycopg counts them among faults of the server. A block that the disk cannot read concerns the rows in it alone.
_OF_ROWS: Final = (pg.IoError, pg.UndefinedFile, pg.ProgramLimitExceeded)
# Whatever the URL, environment or role says: our lists are written so (see `arrays`), and emails hold any letter.
_ENCODING: Final = "utf8"
_OPTIONS: Final[dict[str, Any]] = {
    "autocommit": True,
    "client_encoding": _ENCODING,
    "connect_timeout": CONNECT_SECONDS,
    # How soon we notice that the server vanished without a word. The other way round, so that a dead host's locks are
    # set free, `configure_session` says the same to the server.
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


class TimedSession(psycopg.AsyncConnection[TupleRow]):
    """A session that ends when its server is frozen, although the server's system keeps the connection open.

    A server is frozen if its disk is gone or its processes are stopped. It cannot end a statement, and another server
    may have taken its place. While a statement takes long, the session asks the server over another connection whether
    it still answers. The session ends if there is no answer, and at the latest after `answer_seconds`.

    Attributes:
        answer_seconds: How long a statement may take.
        doubt_seconds: See DOUBT_SECONDS.
        is_given_up: It ended because its server was silent.
        fault: Why the class's last attempt to connect failed; None once one has succeeded.
    """

    answer_seconds = ANSWER_SECONDS
    doubt_seconds = DOUBT_SECONDS
    is_given_up = False
    fault: ClassVar[str | None] = None

    @classmethod
    async def connect(cls, *arguments: Any, **named: Any) -> Self:
        """Opens a session."""
        try:
            opened = await super().connect(*arguments, **named)
        except psycopg.OperationalError as error:
            cls.fault = str(error)
            raise
        cls.fault = None
        return opened

    async def wait(self, gen: PQGen[T], *arguments: Any, **named: Any) -> T:
        """What psycopg waits by, for everything that it asks."""
        loop = asyncio.get_running_loop()
        doubts: list[asyncio.Task[None]] = []
        late = loop.call_later(
            min(self.doubt_seconds, self.answer_seconds),
            lambda give_up_at: doubts.append(loop.create_task(self._doubt(give_up_at))),
            loop.time() + self.answer_seconds,
        )
        try:
            return await super().wait(gen, *arguments, **named)
        finally:
            late.cancel()
            for doubt in doubts:
                doubt.cancel()

    async def _doubt(self, give_up_at: float) -> None:
        """Cuts the session when its server does not answer, and at the latest when the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(give_up_at):
                while await self._server_answers():  # noqa: ASYNC110 - a frozen server can wake nobody
                    await asyncio.sleep(self.doubt_seconds)
        self._cut()

    async def _server_answers(self) -> bool:
        try:
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as shared:
                address = shared.getpeername()
            async with asyncio.timeout(self.doubt_seconds):
                reader, writer = await (
                    asyncio.open_unix_connection(address)
                    if isinstance(address, str)
                    else asyncio.open_connection(*address[:2])
                )
                try:
                    writer.write(_SSL_REQUEST)
                    return bool(await reader.read(1))
                finally:
                    writer.transport.abort()
        except (OSError, psycopg.Error):
            return False

    def _cut(self) -> None:
        self.is_given_up = True
        # To psycopg it looks as if the server had ended the session, whatever it is waiting for.
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.pgconn.socket)) as shared:
            shared.shutdown(socket.SHUT_RDWR)


@contextmanager
def translated() -> Iterator[None]:
    """Turns psycopg's exceptions into ours.

    Raises:
        StoreUnavailable: the server is away, ended the session, timed out, or asks to try again (deadlock,
            serialization failure); the same call may succeed later. StoreBusy where it waited for a lock too long,
            StoreRefused where the server does not let us in, AnswerTooLarge where we have no memory for the answer.
        SchemaError: a schema, table or function is missing.
        ValueRefused: a value is out of range, or no text that it can hold.
        StatementRefused: anything else that the server refused, by its code, without the statement's values: a damaged
            row, a trigger that raises. Also a value in an answer that is no text or JSON: the statement was executed.
    """
    try:
        yield
    except (pg.InvalidSchemaName, pg.UndefinedTable, pg.UndefinedFunction, pg.UndefinedColumn) as error:
        raise SchemaError(
            f'The database does not have this release\'s tables in the schema "{schema()}".',
            remedy="Run `dispatcher init`, or set DISPATCHER_DATABASE_SCHEMA if they are in another schema.",
        ) from error
    except pg.LockNotAvailable as error:
        raise StoreBusy(f"PostgreSQL is not available: {_first_line(error)}.") from error
    except (pg.InsufficientPrivilege, pg.InvalidPassword, pg.InvalidCatalogName, pg.ReadOnlySqlTransaction) as error:
        remedy = _GRANTS if isinstance(error, pg.InsufficientPrivilege) else None
        raise StoreUnavailable(f"PostgreSQL refuses us: {_first_line(error)}.", remedy=remedy) from error
    except _OF_ROWS as error:
        raise _refused(error) from error
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        words = _first_line(error)
        if remedy := _remedy(words):
            raise StoreRefused(f"PostgreSQL is not available: {words}.", remedy=remedy) from error
        raise StoreUnavailable(f"PostgreSQL is not available: {words}.") from error
    except psycopg.DataError as error:
        raise ValueRefused(f"PostgreSQL refused a value ({error.sqlstate or type(error).__name__}).") from error
    except psycopg.Error as error:
        raise _refused(error) from error
    except (UnicodeDecodeError, orjson.JSONDecodeError) as error:
        raise StatementRefused(f"PostgreSQL holds a value that cannot be read ({type(error).__name__}).") from None


def _refused(error: psycopg.Error) -> StatementRefused | AnswerTooLarge:
    """The error for a statement without an answer: the server refused it, or libpq had no memory for the answer."""
    if error.sqlstate is None and "memory" in (words := _first_line(error)):
        return AnswerTooLarge(f"This process has no memory left for PostgreSQL's answer ({words}).")
    return StatementRefused(f"PostgreSQL refused a statement ({error.sqlstate or type(error).__name__}).")


def _remedy(words: str) -> str | None:
    """What an operator can do where the server answers a login, but with a no."""
    if "authentication failed" in words:
        return _LOGIN_REMEDY
    return _NAME_REMEDY if 'FATAL:  database "' in words and "does not exist" in words else None


def _first_line(error: Exception) -> str:
    # The first line names the server and the cause; what follows may quote rows.
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        return error.diag.message_primary.strip().rstrip(".")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@contextmanager
def connected(database_url: str, *, name: str = "dispatcher") -> Iterator[psycopg.Connection[TupleRow]]:
    """A synchronous connection in autocommit, for one command; closed on exit. Faults are ours (see `translated`)."""
    check_url(database_url)
    with translated():
        connection = psycopg.connect(database_url, application_name=name, **_OPTIONS)
    with translated(), connection:
        yield connection


def check_url(database_url: str) -> None:
    """Asserts that libpq understands the URL.

    Raises:
        ConfigurationError: it does not; in words of ours, because libpq's may quote the password.
    """
    try:
        conninfo_to_dict(database_url)
    except psycopg.ProgrammingError:
        mistake = "DISPATCHER_DATABASE_URL is not a URL that PostgreSQL's libpq understands: check its form and options"
        raise ConfigurationError([f"{mistake}, like postgresql://user:password@host:5432/dispatcher."]) from None


async def connect_async(
    database_url: str, *, name: str, lock_seconds: float = LOCK_SECONDS, keeps_plans: bool = False
) -> AsyncSession:
    """One asynchronous connection in autocommit, of which a lost peer is noticed; the caller closes it.

    Args:
        lock_seconds: How long a statement may wait for another transaction's lock.
        keeps_plans: It executes the relay's statements and no others, which are planned once (see `keep_plans`).
    """
    connection = await connect_unconfigured(database_url, name=name)
    with translated():
        try:
            await _configure(connection, lock_seconds, keeps_plans=keeps_plans)
        except BaseException:
            await connection.close()
            raise
        return connection


async def connect_unconfigured(database_url: str, *, name: str) -> AsyncSession:
    """As `connect_async`, but changes no setting of the session, which a pooler may share with others."""
    with translated():
        return await TimedSession.connect(database_url, application_name=name, **_OPTIONS)


async def unhurry(session: AsyncSession) -> None:
    """Lets a session's statements take as long as they take, from now on.

    A server that vanished is noticed as soon as ever; one that stands and says nothing, only after `UNHURRIED_SECONDS`.
    """
    with translated():
        await session.execute(query("lift_statement_timeout"))
    if isinstance(session, TimedSession):
        session.answer_seconds = UNHURRIED_SECONDS


def make_pool(
    database_url: str, *, name: str, size: int, lock_seconds: float = LOCK_SECONDS, keeps_plans: bool = False
) -> Pool:
    """A pool that is not open yet: open it in the process that uses it, never before a fork.

    Args:
        name: The sessions' `application_name`; a dead worker's sessions are found by it.
        size: Connections, all of them opened and kept.
        lock_seconds: How long a statement may wait for another transaction's lock.
        keeps_plans: They execute a worker's statements and no others, which are planned once (see `keep_plans`).
    """
    from psycopg_pool import AsyncConnectionPool

    class PooledSession(TimedSession):
        """Keeps `fault` for this pool alone."""

    return AsyncConnectionPool(
        database_url,
        connection_class=PooledSession,
        kwargs={"application_name": name, **_OPTIONS},
        min_size=size,
        max_size=size,
        open=False,
        configure=partial(_configure, lock_seconds=lock_seconds, keeps_plans=keeps_plans),
        name=name,
        timeout=CONNECT_SECONDS,
        reconnect_timeout=CONNECT_SECONDS,
    )


@asynccontextmanager
async def session(pool: Pool) -> AsyncIterator[AsyncSession]:
    """A session of the pool; faults are ours (see `translated`)."""
    with translated():
        connection: AsyncSession | None = None
        try:
            async with pool.connection() as connection:
                _heed_cancellation()
                try:
                    yield connection
                except (pg.ReadOnlySqlTransaction, StoreUnavailable) as error:
                    if _is_read_only(error):
                        # It stays so, even if the server may write again or another has taken its place, and the pool
                        # would keep it for an hour.
                        await connection.close()
                    raise
        except (psycopg.OperationalError, StoreUnavailable) as error:
            cause = error.__cause__ if isinstance(error, StoreUnavailable) else error
            if isinstance(cause, pg.LockNotAvailable) or not isinstance(cause, psycopg.OperationalError):
                raise
            # What cut this session has cut the others, too: they are replaced now, before a statement fails on them. A
            # server that was silent is not asked again for each of them.
            is_silent = isinstance(connection, TimedSession) and connection.is_given_up
            await (pool.drain() if is_silent else pool.check())
            _heed_cancellation()
            kind = pool.connection_class
            if connection is None and issubclass(kind, TimedSession) and kind.fault:
                # The pool's own error says how long it tried, and not why it failed.
                raise psycopg.OperationalError(kind.fault) from error
            raise


def _is_read_only(error: Exception) -> bool:
    return isinstance(error, pg.ReadOnlySqlTransaction) or isinstance(error.__cause__, pg.ReadOnlySqlTransaction)


def _heed_cancellation() -> None:
    """Ends a task that was cancelled while the pool gave it a session, or looked at those that it has.

    For the one the pool waits by `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that comes in the
    moment of the hand-over; in the other it takes the cancellation for a broken session. A process that stops would
    wait for that task for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _configure(connection: AsyncSession, lock_seconds: float, *, keeps_plans: bool) -> None:
    """Makes a session fit for the protocol: a commit waits for the disk, because an outside action follows it."""
    set_json_loads(orjson.loads, connection)
    connection.adapters.register_dumper(list, BatchDumper)
    await connection.execute(
        query("configure_session"), {"statement_seconds": STATEMENT_SECONDS, "lock_seconds": lock_seconds}
    )
    if keeps_plans:
        await connection.execute(query("keep_plans"))
