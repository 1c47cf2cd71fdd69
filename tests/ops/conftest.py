"""Tables, queues and a session, as operators have them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.store.connections import AsyncSession, connect_async
from tests.broker.rabbit import Rabbit
from tests.ops.morgue import Morgue
from tests.store.books import Books


@pytest.fixture
async def session(tables_url: str) -> AsyncIterator[AsyncSession]:
    """An operator's session."""
    async with await connect_async(tables_url, name="operator") as opened:
        yield opened


@pytest.fixture
async def dlq(servers: Servers, topology: Topology) -> AsyncIterator[DeadLetterQueue]:
    """An operator's view of this test's DLQ."""
    async with await open_connection(servers.amqp_url, name="operator") as connection:
        yield DeadLetterQueue(connection, topology.dlq)


@pytest.fixture
async def morgue(servers: Servers, topology: Topology, books: Books) -> AsyncIterator[Morgue]:
    """Failed and held emails with their dead letters."""
    async with await open_connection(servers.amqp_url, name="test") as connection:
        yield Morgue(books, Rabbit(connection), topology)
