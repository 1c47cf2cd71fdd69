"""APIs for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from tests.api.place import UNREACHABLE_AMQP_URL, Api, running, settings_of


@pytest.fixture
def settings(servers: Servers, database_url: str, topology_names: Topology) -> Settings:
    """Settings for an API of this test's own; RabbitMQ is away."""
    return settings_of(database_url, UNREACHABLE_AMQP_URL, topology_names)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    """An API without keys and without RabbitMQ: what is accepted stays due."""
    async with running(settings) as place:
        yield place
