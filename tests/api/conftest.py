"""Fixtures: the settings of an API, and a running API."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from tests.api.running_api import UNREACHABLE_AMQP_URL, Api, running, settings_of
from tests.broker.takers import start_taker

__all__ = ["start_taker"]


@pytest.fixture
def database_url(tables_url: str) -> str:
    """A migrated, empty database. Modules whose tests change the schema replace this fixture by `own_database_url`."""
    return tables_url


@pytest.fixture
def settings(servers: Servers, database_url: str, topology_names: Topology) -> Settings:
    """Settings for an API with a separate database, and with an AMQP URL at which no RabbitMQ runs."""
    return settings_of(database_url, UNREACHABLE_AMQP_URL, topology_names)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    """A running API without keys and without RabbitMQ: enqueued emails stay due."""
    async with running(settings) as api:
        yield api
