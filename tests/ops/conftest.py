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
from tests.ops.dead_emails import DeadEmails
from tests.store.books import Books


@pytest.fixture
async def session(tables_url: str) -> AsyncIterator[AsyncSession]:
    """An operator's session."""
    async with await connect_async(tables_url, name="operator") as opened:
        yield opened


@pytest.fixture
def settings(servers: Servers, tables_url: str, topology: Topology) -> Settings:
    """The settings of a process that uses this test's tables and queues."""
    return settings_of(tables_url, servers.amqp_url, topology)


@pytest.fixture
async def dlq(servers: Servers, topology: Topology) -> AsyncIterator[DeadLetterQueue]:
    """The test's DLQ, through an operator's connection."""
    async with await open_connection(servers.amqp_url, name="operator") as connection:
        yield DeadLetterQueue(connection, topology.dlq)


@pytest.fixture
async def dead_emails(servers: Servers, topology: Topology, books: Books) -> AsyncIterator[DeadEmails]:
    """Creates failed and held emails with their dead letters."""
    async with await open_connection(servers.amqp_url, name="test") as connection:
        yield DeadEmails(books, Rabbit(connection), topology)
