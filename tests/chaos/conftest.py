"""Fixtures with a PostgreSQL server that a test may stop, and with the RabbitMQ of the whole test run."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate
from tests.acceptance.harness import Host
from tests.acceptance.outages import POSTGRES, StoppableServers
from tests.chaos.plan import Ground


@pytest.fixture
def stoppable(disturbed: Servers) -> StoppableServers:
    return StoppableServers(disturbed)


@pytest.fixture
def stoppable_database_url(stoppable: StoppableServers) -> str:
    name = f"chaos_{secrets.token_hex(6)}"
    with psycopg.connect(stoppable.servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    url = urlunsplit(urlsplit(stoppable.servers.database_url)._replace(path=f"/{name}"))
    with connected(url) as connection:
        migrate(connection)
    return url


@pytest.fixture
def ground(stoppable: StoppableServers, stoppable_database_url: str, topology: Topology) -> Ground:
    """The servers of a storm. The storm may cut its own connections to RabbitMQ but may not stop RabbitMQ."""
    return Ground(stoppable, (POSTGRES,), stoppable_database_url, topology, shares_broker=True)


@pytest.fixture
def host(
    tmp_path: Path, stoppable: StoppableServers, stoppable_database_url: str, topology: Topology
) -> Iterator[Host]:
    """A host whose PostgreSQL server a test may stop."""
    opened = Host(tmp_path, stoppable.servers, stoppable_database_url, topology)
    yield opened
    opened.destroy()
