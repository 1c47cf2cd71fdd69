"""Fixtures: `dispatcher` in the test's process: without settings, or with servers, tables, queues and a provider."""

from __future__ import annotations

import secrets
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.cli.commandline import CommandLine, settings_for
from tests.store.books import Books


@pytest.fixture
def database_url(tables_url: str) -> str:
    """A migrated, empty database. Modules whose tests change the schema replace this fixture by `own_database_url`."""
    return tables_url


@pytest.fixture
def tables(connection: psycopg.Connection) -> Books:
    return Books(connection)


@pytest.fixture
def bare(tmp_path: Path) -> CommandLine:
    environment = {"DISPATCHER_RUN_DIR": str(tmp_path / "run"), "DISPATCHER_METRICS_ADDRESS": "off"}
    return CommandLine(tmp_path, environment, needs_process=False)


@pytest.fixture
def prepared(bare: CommandLine, servers: Servers, database_url: str, topology: Topology) -> CommandLine:
    """`dispatcher` after `init`, with the capture provider and with a separate database and queues."""
    return bare.having(**settings_for(topology, servers, database_url))


@pytest.fixture(scope="session")
def settled(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """Like `prepared`, but shared by all tests of the session. Use it only in tests that change nothing."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    database_url = urlsplit(servers.database_url)._replace(path=f"/{name}").geturl()
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq")
    folder = tmp_path_factory.mktemp("settled")
    commandline = CommandLine(folder, {"DISPATCHER_RUN_DIR": str(folder / "run")}, needs_process=False)
    commandline = commandline.having(**settings_for(topology, servers, database_url))
    assert commandline("init").code == 0
    return commandline


@pytest.fixture
def storing(bare: CommandLine, database_url: str) -> CommandLine:
    """`dispatcher` on an application's host: with tables, without RabbitMQ and without providers."""
    return bare.having(DISPATCHER_DATABASE_URL=database_url)


@pytest.fixture
def unprepared(bare: CommandLine, servers: Servers, empty_database_url: str, topology_names: Topology) -> CommandLine:
    return bare.having(**settings_for(topology_names, servers, empty_database_url))
