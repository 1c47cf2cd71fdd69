"""What every test may ask for: private servers once per run, a database cloned per test, queues of its own per test."""

from __future__ import annotations

import secrets
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

import hypothesis
import psycopg
import pytest
from psycopg import sql

from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

pytest_plugins = ["tests.store.fixtures"]


# The same examples in every run, and no verdict over how busy the machine was while they were tried.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

_SERVERS: Final = pytest.StashKey[Servers]()


@contextmanager
def _servers_of_a_run() -> Iterator[Servers]:
    # A short path: sockets and cookies live in it.
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-tests-") as folder,
        private_servers(Path(folder) / "servers", progress=print) as running,
    ):
        yield running


def pytest_configure() -> None:
    """Gives Ctrl-C and the end of a terminal their meaning back, which a shell in the background and `nohup` take away.

    The programs under test would inherit that, and wait for ever for a stop that they cannot hear.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Not for us: a handler is forgotten by what we start, and so is what was ignored.
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Where several processes share the tests, the one that hands them out starts the servers for all."""
    config = node.config
    if _SERVERS not in config.stash:
        running = _servers_of_a_run()
        config.stash[_SERVERS] = running.__enter__()
        config.add_cleanup(lambda: running.__exit__(None, None, None))
    node.workerinput["servers"] = {**asdict(config.stash[_SERVERS]), "folder": str(config.stash[_SERVERS].folder)}


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """PostgreSQL and RabbitMQ for the whole run, with its own data, gone afterwards."""
    shared = getattr(request.config, "workerinput", {}).get("servers")
    if shared:
        yield Servers(**{**shared, "folder": Path(shared["folder"])})
    else:
        with _servers_of_a_run() as running:
            yield running


@pytest.fixture(scope="session")
def template_database(servers: Servers) -> str:
    """The name of a migrated database that tests clone."""
    name = f"template_{secrets.token_hex(4)}"
    _administer(servers, sql.SQL("create database {}").format(sql.Identifier(name)))
    with connected(_named(servers.database_url, name)) as connection:
        migrate(connection)
    return name


@pytest.fixture
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """A migrated database for this test alone."""
    name = f"test_{secrets.token_hex(6)}"
    clone = sql.SQL("create database {} template {} strategy wal_log")
    _administer(servers, clone.format(sql.Identifier(name), sql.Identifier(template_database)))
    yield _named(servers.database_url, name)
    _administer(servers, sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def empty_database_url(servers: Servers) -> Iterator[str]:
    """A database without any table, for this test alone."""
    name = f"test_{secrets.token_hex(6)}"
    _administer(servers, sql.SQL("create database {}").format(sql.Identifier(name)))
    yield _named(servers.database_url, name)
    _administer(servers, sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port where nobody listens, and nobody else can while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    """A connection to this test's database, in autocommit."""
    with psycopg.connect(database_url, autocommit=True) as opened:
        yield opened


@pytest.fixture
def topology_names() -> Topology:
    """An exchange and queues that no other test knows; not declared yet."""
    name = f"test.{secrets.token_hex(6)}"
    return Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")


@pytest.fixture
async def topology(servers: Servers, topology_names: Topology) -> AsyncIterator[Topology]:
    """An exchange and queues for this test alone, deleted afterwards."""
    await declare(servers.amqp_url, topology_names)
    yield topology_names
    async with await open_connection(servers.amqp_url, name="test clean-up") as opened:
        channel = await opened.open_channel()
        await channel.call(channel.raw.queue_delete, queue=topology_names.queue)
        await channel.call(channel.raw.queue_delete, queue=topology_names.dlq)
        await channel.call(channel.raw.exchange_delete, exchange=topology_names.exchange)


def _named(database_url: str, name: str) -> str:
    return urlunsplit(urlsplit(database_url)._replace(path=f"/{name}"))


def _administer(servers: Servers, statement: sql.Composed) -> None:
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(statement)
