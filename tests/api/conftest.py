"""Fixtures: the settings of an API, a running API without and with the operators' page, and browsers that visit it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from tests.api.ops_page.browsing import Browser, signed_in
from tests.api.running_api import UNREACHABLE_AMQP_URL, Api, make_key, running, settings_of


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


@pytest.fixture
def ops_settings(settings: Settings) -> Settings:
    return replace(settings, ops=True)


@pytest.fixture
def operator_key(connection: psycopg.Connection) -> str:
    return make_key(connection, scopes=["operate"], tenant_id=None, name="ann")


@pytest.fixture
async def ops_api(operator_key: str, ops_settings: Settings) -> AsyncIterator[Api]:
    async with running(ops_settings) as api:
        yield api


@pytest.fixture
def browser(ops_api: Api) -> Browser:
    return Browser(ops_api)


@pytest.fixture
async def operator(ops_api: Api, operator_key: str) -> Browser:
    return await signed_in(ops_api, operator_key)


@pytest.fixture
async def shop_operator(connection: psycopg.Connection, ops_api: Api) -> Browser:
    return await signed_in(ops_api, make_key(connection, scopes=["operate"], name="shop desk"))


@pytest.fixture
async def reader(connection: psycopg.Connection, ops_api: Api) -> Browser:
    return await signed_in(ops_api, make_key(connection, scopes=["read"], tenant_id=None, name="wall screen"))
