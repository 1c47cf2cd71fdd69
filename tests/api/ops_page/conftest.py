"""Fixtures: a running API with the operators' page, and browsers that visit it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from tests.api.ops_page.browsing import Browser
from tests.api.running_api import UNREACHABLE_AMQP_URL, Api, make_key, running, settings_of
from tests.store.books import Books


@pytest.fixture
def ops_settings(servers: Servers, database_url: str, topology_names: Topology) -> Settings:
    """Settings for an API with the operators' page, with a separate database and without RabbitMQ."""
    return settings_of(database_url, UNREACHABLE_AMQP_URL, topology_names, OPS="on")


@pytest.fixture
def books(connection: psycopg.Connection) -> Books:
    """Direct access to the tables of the test's database."""
    return Books(connection)


@pytest.fixture
def operator_key(connection: psycopg.Connection) -> str:
    """A key of an operator for all tenants."""
    return make_key(connection, scopes=["operate"], tenant_id=None, name="ann")


@pytest.fixture
async def ops_api(operator_key: str, ops_settings: Settings) -> AsyncIterator[Api]:
    """A running API with the operators' page, which needs a key."""
    async with running(ops_settings) as api:
        yield api


@pytest.fixture
def browser(ops_api: Api) -> Browser:
    """A browser that is not signed in."""
    return Browser(ops_api)


@pytest.fixture
async def operator(browser: Browser, operator_key: str) -> Browser:
    """The browser of an operator for all tenants, signed in."""
    await browser.sign_in(operator_key)
    return browser
