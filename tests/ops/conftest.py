"""Fixtures: tables, queues, and an operator's session."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from dispatcher.store.connections import AsyncSession, connect_async
from tests.api.running_api import settings_of
from tests.broker.rabbit import Rabbit
from tests.ops.dead_emails import Desk
from tests.store.books import Books


@pytest.fixture
async def session(tables_url: str) -> AsyncIterator[AsyncSession]:
    async with await connect_async(tables_url, name="operator") as opened:
        yield opened


@pytest.fixture
def settings(servers: Servers, tables_url: str, topology: Topology) -> Settings:
    return settings_of(tables_url, servers.amqp_url, topology)


@pytest.fixture
def desk(session: AsyncSession, tables_url: str, books: Books) -> Desk:
    """A desk without a DLQ, whose declaration takes longer than most tests."""
    return Desk(session, tables_url, books, None, None, None)


@pytest.fixture
async def queue(
    session: AsyncSession, tables_url: str, books: Books, servers: Servers, topology: Topology
) -> AsyncIterator[Desk]:
    """A desk with the test's DLQ."""
    async with await open_connection(servers.amqp_url, name="operator") as connection:
        dlq = DeadLetterQueue(connection, topology.dlq)
        yield Desk(session, tables_url, books, dlq, Rabbit(connection), topology)
