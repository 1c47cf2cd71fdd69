"""Opens PostgreSQL sessions and pools, and translates psycopg's errors into the project's own."""

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
    StoreTooSlow,
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
"""The longest wait for the answer to a statement. A working server cancels the statement sooner, after
`STATEMENT_SECONDS`."""
PROBE_SECONDS: Final = 4.0
"""The length of three periods: how long a statement runs before the session probes its server, the interval between
probes, and how long the session waits for the answer to a probe. So a session detects a frozen server after about twice
this time."""
_SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""Every PostgreSQL server and pooler answers this request with one byte, without a login (PostgreSQL documentation,
55.7)."""
NO_TIMEOUT_ANSWER_SECONDS: Final = 86_400.0
"""As `ANSWER_SECONDS`, for sessions without a statement timeout. To read a weekly partition takes much less time."""
LOCK_SECONDS: Final = 10
BATCH_LOCK_SECONDS: Final = 2
"""Lock timeout of batched statements: one locked row must not delay the other emails for long."""
_LOGIN_REMEDY: Final = (
    "Correct the user and password in DISPATCHER_DATABASE_URL (write @ as %40 and / as %2F), or set that user's "
    "password in PostgreSQL."
)
_NAME_REMEDY: Final = (
    "Correct the database name at the end of DISPATCHER_DATABASE_URL, or create the database: "
    "createdb --encoding UTF8 NAME."
)
_GRANTS: Final = "As the owner of the tables, execute the statements that `dispatcher topology grants` prints."
# psycopg classifies these errors as errors of the server, but this module treats them as errors of rows. A block that
# the disk cannot read (IoError) or a missing file (UndefinedFile) affects only some rows. ProgramLimitExceeded means
# that a row is too large for PostgreSQL, for example for an index.
_OF_ROWS: Final = (pg.IoError, pg.UndefinedFile, pg.ProgramLimitExceeded)
# Overrides a client encoding that is set in the URL, in the environment or for the role, because `arrays` writes lists
# in this encoding, and emails can contain any character.
_ENCODING: Final = "utf8"
_OPTIONS: Final[dict[str, Any]] = {
    "autocommit": True,
    "client_encoding": _ENCODING,
    "connect_timeout": CONNECT_SECONDS,
    # With these values, the client detects within about 15 seconds that the server has vanished. `configure_session`
    # sets the same values for the server, which then releases the locks of a vanished client.
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


class TimedSession(psycopg.AsyncConnection[TupleRow]):
    """A session that ends when its server is frozen, even though the kernel keeps the TCP connection open.

    A server is frozen if its disk does not respond or its processes are stopped. A frozen server cannot time out a
    statement, and a different server may have replaced it. If a statement takes long, the session probes the server
    over a second connection. The session ends if a probe gets no answer, or when the statement takes longer than
    `answer_seconds`.
    """

    answer_seconds = ANSWER_SECONDS
    probe_seconds = PROBE_SECONDS
    is_server_silent = False  # whether the session ended because the server did not answer
    fault: ClassVar[str | None] = None  # why the last attempt to connect failed; shared by all instances

    @classmethod
    async def connect(cls, *arguments: Any, **named: Any) -> Self:
        try:
            opened = await super().connect(*arguments, **named)
        except psycopg.OperationalError as error:
            cls.fault = str(error)
            raise
        cls.fault = None
        return opened

    async def wait(self, gen: PQGen[T], *arguments: Any, **named: Any) -> T:
        """Waits for the server's answer. psycopg calls this method for every request."""
        if "timeout" in named:  # a wait for a notification; by default, psycopg wakes the process ten times per second
            named.setdefault("interval", NO_TIMEOUT_ANSWER_SECONDS)
        loop = asyncio.get_running_loop()
        watchers: list[asyncio.Task[None]] = []
        late = loop.call_later(
            min(self.probe_seconds, self.answer_seconds),
            lambda give_up_at: watchers.append(loop.create_task(self._watch_server(give_up_at))),
            loop.time() + self.answer_seconds,
        )
        try:
            return await super().wait(gen, *arguments, **named)
        finally:
            late.cancel()
            for watcher in watchers:
                watcher.cancel()

    async def _watch_server(self, give_up_at: float) -> None:
        """Closes the connection when the server stops answering, and at `give_up_at` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(give_up_at):
                while await self._server_answers():  # noqa: ASYNC110 - a frozen server sends no event to wait for
                    await asyncio.sleep(self.probe_seconds)
        self._cut()

    async def _server_answers(self) -> bool:
        try:
            with socket.socket(fileno=os.dup(self.pgconn.socket)) as shared:
                address = shared.getpeername()
            async with asyncio.timeout(self.probe_seconds):
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
        self.is_server_silent = True
        # Shut the socket down. In every state, psycopg then behaves as if the server had closed the connection.
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.pgconn.socket)) as shared:
            shared.shutdown(socket.SHUT_RDWR)


@contextmanager
def translated() -> Iterator[None]:
    """Translates psycopg's exceptions in the block into the exceptions of `dispatcher.errors`.

    StoreUnavailable: the same call might succeed later; its subclasses name some of the faults. SchemaError: a schema,
    table or function is missing. ValueRefused: a value is out of range, or is a text that PostgreSQL cannot store.
    StatementRefused: another reason, such as a damaged row or a trigger that raises an error; the message contains no
    values. StatementRefused is also raised after a statement was executed, if its answer contains a value that is not
    valid text or JSON.
    """
    try:
        yield
    except (pg.InvalidSchemaName, pg.UndefinedTable, pg.UndefinedFunction, pg.UndefinedColumn) as error:
        raise SchemaError(
            f'The database does not have this release\'s tables in the schema "{schema()}".',
            remedy="Run `dispatcher init`, or set DISPATCHER_DATABASE_SCHEMA if the tables are in another schema.",
        ) from error
    except (pg.LockNotAvailable, pg.QueryCanceled) as error:
        kind = StoreBusy if isinstance(error, pg.LockNotAvailable) else StoreTooSlow
        raise kind(f"PostgreSQL is not available: {_first_line(error)}.") from error
    except (pg.InsufficientPrivilege, pg.InvalidPassword, pg.InvalidCatalogName, pg.ReadOnlySqlTransaction) as error:
        remedy = _GRANTS if isinstance(error, pg.InsufficientPrivilege) else None
        raise StoreUnavailable(f"PostgreSQL refuses access: {_first_line(error)}.", remedy=remedy) from error
    except _OF_ROWS as error:
        raise _refused(error) from error
    except (psycopg.OperationalError, psycopg.InterfaceError, pg.IdleInTransactionSessionTimeout) as error:
        words = _first_line(error)
        if remedy := _login_remedy(words):
            raise StoreRefused(f"PostgreSQL is not available: {words}.", remedy=remedy) from error
        raise StoreUnavailable(f"PostgreSQL is not available: {words}.") from error
    except psycopg.DataError as error:
        raise ValueRefused(f"PostgreSQL refused a value ({error.sqlstate or type(error).__name__}).") from error
    except psycopg.Error as error:
        raise _refused(error) from error
    except (UnicodeDecodeError, orjson.JSONDecodeError) as error:
        raise StatementRefused(f"PostgreSQL contains a value that cannot be read ({type(error).__name__}).") from None


def _refused(error: psycopg.Error) -> StatementRefused | AnswerTooLarge:
    if error.sqlstate is None and "memory" in (words := _first_line(error)):
        return AnswerTooLarge(f"This process does not have enough memory for PostgreSQL's answer ({words}).")
    return StatementRefused(f"PostgreSQL refused a statement ({error.sqlstate or type(error).__name__}).")


def _login_remedy(words: str) -> str | None:
    if "authentication failed" in words:
        return _LOGIN_REMEDY
    return _NAME_REMEDY if 'FATAL:  database "' in words and "does not exist" in words else None


def _first_line(error: Exception) -> str:
    # Return only the first line, which names the server and the cause. The following lines may quote rows.
    if isinstance(error, psycopg.Error) and error.diag.message_primary:
        return error.diag.message_primary.strip().rstrip(".")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@contextmanager
def connected(database_url: str, *, name: str = "dispatcher") -> Iterator[psycopg.Connection[TupleRow]]:
    """A synchronous connection in autocommit mode, closed on exit. Errors are translated (see `translated`)."""
    check_url(database_url)
    with translated():
        connection = psycopg.connect(database_url, application_name=name, **_OPTIONS)
    with translated(), connection:
        yield connection


def check_url(database_url: str) -> None:
    """Raises ConfigurationError if libpq cannot parse the URL, without libpq's message, which might quote the
    password."""
    try:
        conninfo_to_dict(database_url)
    except psycopg.ProgrammingError:
        mistake = "DISPATCHER_DATABASE_URL is not a URL that PostgreSQL's libpq can parse."
        raise ConfigurationError(
            [f"{mistake} Check its form and options. Example: postgresql://user:password@host:5432/dispatcher."]
        ) from None


async def connect_async(
    database_url: str,
    *,
    name: str,
    lock_seconds: float = LOCK_SECONDS,
    idle_seconds: float | None = None,
    keeps_plans: bool = False,
) -> AsyncSession:
    """Opens an asynchronous session in autocommit mode, which detects a frozen server. The caller closes the session.

    PostgreSQL ends the session after `idle_seconds` without a statement, so that a frozen host loses its named locks;
    None: as the server is configured. `keeps_plans`: see `make_pool`.
    """
    connection = await connect_unconfigured(database_url, name=name)
    with translated():
        try:
            await _configure(connection, lock_seconds, idle_seconds=idle_seconds, keeps_plans=keeps_plans)
        except BaseException:
            await connection.close()
            raise
        return connection


async def connect_unconfigured(database_url: str, *, name: str) -> AsyncSession:
    """As `connect_async`, but changes no session setting, because a pooler may share the session with other clients."""
    with translated():
        return await TimedSession.connect(database_url, application_name=name, **_OPTIONS)


async def disable_statement_timeout(session: AsyncSession) -> None:
    """Disables the statement timeout of this session.

    The session still detects a vanished or frozen server as quickly as before. If the server answers the session's
    probes, but not a statement, the session ends after `NO_TIMEOUT_ANSWER_SECONDS`.
    """
    with translated():
        await session.execute(query("disable_statement_timeout"))
    if isinstance(session, TimedSession):
        session.answer_seconds = NO_TIMEOUT_ANSWER_SECONDS


def load_pools() -> None:
    """Imports the library of `make_pool`. Call this before a fork, so that the processes share the library's memory."""
    import psycopg_pool  # noqa: F401


def make_pool(
    database_url: str,
    *,
    name: str,
    size: int,
    lock_seconds: float = LOCK_SECONDS,
    statement_seconds: float = STATEMENT_SECONDS,
    keeps_plans: bool = False,
) -> Pool:
    """A pool that is not open yet. Open it in the process that uses it, never before a fork.

    Recovery finds a dead worker's sessions by `name`, their `application_name`. The pool opens `size` connections, and
    keeps them open. With `keeps_plans`, PostgreSQL keeps the plan of each statement (see sql/queries/schema.sql): only
    for sessions that execute nothing but a worker's, or the relay's, statements.
    """
    from psycopg_pool import AsyncConnectionPool

    class PooledSession(TimedSession):
        """The sessions of one pool. Each pool has its own class, and so its own `fault` (see `TimedSession`)."""

    return AsyncConnectionPool(
        database_url,
        connection_class=PooledSession,
        kwargs={"application_name": name, **_OPTIONS},
        min_size=size,
        max_size=size,
        open=False,
        configure=partial(
            _configure, lock_seconds=lock_seconds, statement_seconds=statement_seconds, keeps_plans=keeps_plans
        ),
        name=name,
        timeout=CONNECT_SECONDS,
        reconnect_timeout=CONNECT_SECONDS,
    )


@asynccontextmanager
async def session(pool: Pool) -> AsyncIterator[AsyncSession]:
    """A session of the pool. Errors are translated (see `translated`)."""
    with translated():
        connection: AsyncSession | None = None
        try:
            async with pool.connection() as connection:
                _raise_if_cancelled()
                try:
                    yield connection
                except (pg.ReadOnlySqlTransaction, StoreUnavailable) as error:
                    if isinstance(error, pg.ReadOnlySqlTransaction) or isinstance(
                        error.__cause__, pg.ReadOnlySqlTransaction
                    ):
                        # This session stays read-only, even after the server accepts writes again, or after another
                        # server has replaced this server. So close the session: the pool would otherwise keep it for an
                        # hour.
                        await connection.close()
                    raise
        except (psycopg.OperationalError, StoreUnavailable) as error:
            cause = error.__cause__ if isinstance(error, StoreUnavailable) else error
            if isinstance(cause, (pg.LockNotAvailable, pg.QueryCanceled)) or not isinstance(
                cause, psycopg.OperationalError
            ):
                raise
            # The pool's other sessions have probably lost their connections, too. Replace the broken sessions now, so
            # that no further statement fails. If the server did not answer, replace all sessions without a check.
            is_silent = isinstance(connection, TimedSession) and connection.is_server_silent
            await (pool.drain() if is_silent else pool.check())
            _raise_if_cancelled()
            kind = pool.connection_class
            if connection is None and issubclass(kind, TimedSession) and kind.fault:
                # The pool's own error says how long the pool tried, but not why it failed.
                raise psycopg.OperationalError(kind.fault) from error
            raise


def _raise_if_cancelled() -> None:
    """Raises CancelledError if the task was cancelled inside the pool, because the pool can lose a cancellation.

    While the pool waits for a free session, it uses `asyncio.wait_for`, which in Python 3.11 loses a cancellation that
    arrives at the same moment as the session. While it checks its sessions, it mistakes a cancellation for a broken
    session. Without this function, a stopping process could wait for the task for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _configure(
    connection: AsyncSession,
    lock_seconds: float,
    *,
    statement_seconds: float = STATEMENT_SECONDS,
    idle_seconds: float | None = None,
    keeps_plans: bool,
) -> None:
    """Sets a new session's timeouts and converters. Each commit waits for the disk (see `configure_session`)."""
    set_json_loads(orjson.loads, connection)
    connection.adapters.register_dumper(list, BatchDumper)
    await connection.execute(
        query("configure_session"),
        {"statement_seconds": statement_seconds, "lock_seconds": lock_seconds, "idle_seconds": idle_seconds},
    )
    if keeps_plans:
        await connection.execute(query("keep_plans"))
