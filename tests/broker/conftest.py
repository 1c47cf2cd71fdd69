"""Fixtures: access to RabbitMQ for one test, and a proxy that disturbs connections."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.management import Management
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Operator, Rabbit
from tests.waiting import DEADLINE_SECONDS


@pytest.fixture
def amqp_url(servers: Servers) -> str:
    return servers.amqp_url


@pytest.fixture
def operator(servers: Servers) -> Operator:
    return Operator(servers.management_url)


@pytest.fixture
def management(servers: Servers) -> Management:
    return Management(servers.management_url, timeout_seconds=DEADLINE_SECONDS)


@pytest.fixture
async def undeclared(rabbit: Rabbit, topology_names: Topology) -> AsyncIterator[Topology]:
    """Names of an exchange and queues that do not exist yet. Objects that a test creates with these names are deleted
    afterwards."""
    yield topology_names
    for queue in topology_names.queues:
        await rabbit.delete_queue(queue)
    await rabbit.delete_exchange(topology_names.exchange)


@pytest.fixture
async def proxy(amqp_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(amqp_url) as running:
        yield running
