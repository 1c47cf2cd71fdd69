"""RabbitMQ for one test, and ways to disturb it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Operator, Rabbit


@pytest.fixture
def amqp_url(servers: Servers) -> str:
    """Where the real RabbitMQ is."""
    return servers.amqp_url


@pytest.fixture
async def rabbit(amqp_url: str) -> AsyncIterator[Rabbit]:
    """A second client."""
    async with await open_connection(amqp_url, name="test") as connection:
        yield Rabbit(connection)


@pytest.fixture
def operator(servers: Servers) -> Operator:
    """Somebody with the management API."""
    return Operator(servers.management_url)


@pytest.fixture
async def undeclared(rabbit: Rabbit, topology_names: Topology) -> AsyncIterator[Topology]:
    """Names of which nothing exists yet; what a test makes of them is gone afterwards."""
    yield topology_names
    for queue in topology_names.queues:
        await rabbit.delete_queue(queue)
    await rabbit.delete_exchange(topology_names.exchange)


@pytest.fixture
async def proxy(amqp_url: str) -> AsyncIterator[Proxy]:
    """A way to RabbitMQ that can be disturbed."""
    async with Proxy(amqp_url) as running:
        yield running
