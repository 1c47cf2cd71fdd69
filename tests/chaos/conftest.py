"""A PostgreSQL that may be taken away, beside the RabbitMQ of the whole test run."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import AMQP_URL, DATABASE_URL, MANAGEMENT_URL, Servers, private_servers
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate
from tests.acceptance.harness import Host
from tests.acceptance.outages import POSTGRES, Removable
from tests.chaos.storm import Ground


@pytest.fixture(scope="session")
def removable(servers: Servers) -> Iterator[Removable]:
    """PostgreSQL of our own; RabbitMQ is everybody's."""
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-removable-") as folder,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.delenv(DATABASE_URL, raising=False)
        environment.setenv(AMQP_URL, servers.amqp_url)
        environment.setenv(MANAGEMENT_URL, servers.management_url)
        with private_servers(Path(folder) / "servers", progress=print) as running:
            environment.undo()
            yield Removable(running)


@pytest.fixture
def removable_database_url(removable: Removable) -> str:
    """A migrated database there, for one test alone."""
    name = f"chaos_{secrets.token_hex(6)}"
    with psycopg.connect(removable.servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    url = urlunsplit(urlsplit(removable.servers.database_url)._replace(path=f"/{name}"))
    with connected(url) as connection:
        migrate(connection)
    return url


@pytest.fixture
def ground(removable: Removable, removable_database_url: str, topology: Topology) -> Ground:
    """For a storm that leaves RabbitMQ alone but for what is ours."""
    return Ground(removable, (POSTGRES,), removable_database_url, topology, shares_broker=True)


@pytest.fixture
def host(tmp_path: Path, removable: Removable, removable_database_url: str, topology: Topology) -> Iterator[Host]:
    """A host whose PostgreSQL may be taken away."""
    opened = Host(tmp_path, removable.servers, removable_database_url, topology)
    yield opened
    opened.destroy()
