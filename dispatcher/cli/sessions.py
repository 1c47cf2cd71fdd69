"""Connections to PostgreSQL and to the DLQ. Each connection is open while one command runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from dispatcher.cli.environment import load_settings

if TYPE_CHECKING:
    from dispatcher.broker.dlq import DeadLetterQueue
    from dispatcher.config import Settings
    from dispatcher.store.connections import AsyncSession

T = TypeVar("T")


def run_with_session(name: str, work: Callable[[AsyncSession], Awaitable[T]], settings: Settings | None = None) -> T:
    """Calls `work` with a PostgreSQL session, whose name contains the command's, and returns its result."""
    loaded = settings or load_settings("database_url")

    async def run() -> T:
        async with open_session(loaded, name) as session:
            return await work(session)

    return asyncio.run(run())


def run_with_dlq(
    name: str, work: Callable[[AsyncSession, DeadLetterQueue], Awaitable[T]], settings: Settings | None = None
) -> T:
    """Like `run_with_session`, but also passes the DLQ to `work`."""
    loaded = settings or load_settings("database_url", "amqp_url")

    async def run() -> T:
        async with open_session(loaded, name) as session, open_dlq(loaded, name) as dlq:
            return await work(session, dlq)

    return asyncio.run(run())


class RunOnSession(Protocol):
    """Does a piece of work on a session, and returns its result."""

    def __call__(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T: ...


@contextmanager
def one_session(name: str, settings: Settings) -> Iterator[RunOnSession]:
    """Yields a function that does work on one PostgreSQL session. Between two calls, the command may ask a question."""

    async def run(work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        return await work(session)

    opened = AsyncExitStack()
    with asyncio.Runner() as runner:
        session = runner.run(opened.enter_async_context(open_session(settings, name)))
        try:
            yield lambda work: runner.run(run(work))
        finally:
            runner.run(opened.aclose())


@asynccontextmanager
async def open_session(settings: Settings, name: str) -> AsyncIterator[AsyncSession]:
    """A PostgreSQL session, closed at the end of the block."""
    from dispatcher.store.connections import check_url, connect_async

    check_url(settings.database_url)
    async with await connect_async(settings.database_url, name=f"dispatcher {name}") as session:
        yield session


@asynccontextmanager
async def open_dlq(settings: Settings, name: str) -> AsyncIterator[DeadLetterQueue]:
    """The DLQ, over a connection that is closed at the end of the block."""
    from dispatcher.broker.connection import open_connection
    from dispatcher.broker.dlq import DeadLetterQueue

    async with await open_connection(
        settings.amqp_url, name=f"dispatcher {name}", ca_file=settings.ca_file
    ) as connection:
        yield DeadLetterQueue(connection, settings.dlq)
