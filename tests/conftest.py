"""Fixtures for all tests: servers that are started once per run, and a database clone and queues for each test."""

from __future__ import annotations

import fcntl
import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

import hypothesis
import orjson
import psycopg
import pytest
from hypothesis.internal.conjecture import providers as examples
from psycopg import sql

from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate
from dispatcher.supervisor.preflight import raise_file_limit
from tests.broker.declarer import Declarer
from tests.broker.rabbit import Rabbit

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

pytest_plugins = ["tests.store.fixtures"]


# Use the same examples in every run, and no deadline, because the machine may be busy. By default, Hypothesis also
# tries constants of imported modules, which would depend on the tests that ran before.
assert hasattr(examples, "is_local_module_file")
examples.is_local_module_file = lambda _: False
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

_SERVERS: Final = pytest.StashKey[Servers]()
_PREFIX: Final = "dispatcher-tests-"
SERVERS_VARIABLE: Final = "DISPATCHER_TEST_SERVERS"
"""Names the servers of a run that starts pytest again and again (tests/mutation), as JSON."""
_MEMORY: Final = Path("/dev/shm")
_MEMORY_BYTES: Final = 4 << 30
"""The free memory that is required, in bytes. A full run needs at most a quarter of this."""


def _in_memory() -> Path | None:
    """A folder in memory for the servers' data; None if memory is short or TMPDIR is set. On disk, the file system's
    journal takes a fifth of a run's time, because tests create and drop hundreds of databases with 300 files each."""
    roomy = _MEMORY.is_mount() and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES
    return _MEMORY if roomy and "TMPDIR" not in os.environ else None


@contextmanager
def _folder_of_a_run() -> Iterator[Path]:
    place = _in_memory()
    for other in place.glob(f"{_PREFIX}*") if place else ():
        # No process uses this folder of a killed run, so free its memory.
        with suppress(BlockingIOError, FileNotFoundError), _locked(other):
            shutil.rmtree(other, ignore_errors=True)
    # The path is short, because the path of a Unix socket is limited to about 100 bytes.
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as folder, _locked(Path(folder)):
        yield Path(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder during the block; raises BlockingIOError if another run has locked it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


@contextmanager
def _servers_of_a_run() -> Iterator[Servers]:
    # After each checkpoint, PostgreSQL would write whole pages to the log, and each new database causes checkpoints.
    settings = {"full_page_writes": "off"}
    with (
        _folder_of_a_run() as folder,
        private_servers(folder / "servers", progress=print, postgres_settings=settings) as running,
    ):
        yield running


def pytest_configure() -> None:
    """Restore the default handling of SIGINT and SIGHUP, which a background shell or `nohup` sets to ignore.

    The programs under test would inherit the ignored signals, and would not stop.
    """
    os.environ.pop("DISPATCHER_DATABASE_SCHEMA", None)  # otherwise statements of this process would use this schema
    raise_file_limit()  # tests open hundreds of connections at the same time
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # A program that a test starts would inherit an ignored signal, but exec resets a handler. So install a handler.
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable the garbage collector during test collection, and exclude the collected tests from later garbage
    collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def _are_compiled() -> bool:
    """Whether pytest has compiled every test file since its last change."""
    tail = f".{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
    for source in Path(__file__).parent.rglob("test_*.py"):
        compiled = source.parent / "__pycache__" / f"{source.stem}{tail}"
        if not compiled.exists() or compiled.stat().st_mtime < source.stat().st_mtime:
            return False
    return True


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile the tests in a separate process during the block, unless they are compiled. Otherwise each process that
    runs tests would compile all of them."""
    if _are_compiled():
        yield
        return
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:xdist"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL):
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """If several processes run the tests, the controller starts the servers for all processes."""
    config = node.config
    if _SERVERS not in config.stash:
        running = _servers_of_a_run()
        with _compiling():
            config.stash[_SERVERS] = running.__enter__()
        config.add_cleanup(lambda: running.__exit__(None, None, None))
    node.workerinput["servers"] = {**asdict(config.stash[_SERVERS]), "folder": str(config.stash[_SERVERS].folder)}


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """PostgreSQL and RabbitMQ for the whole run, with empty data directories that are removed afterwards."""
    shared = getattr(request.config, "workerinput", {}).get("servers")
    if SERVERS_VARIABLE in os.environ:
        shared = orjson.loads(os.environ[SERVERS_VARIABLE])
    if shared:
        yield Servers(**{**shared, "folder": Path(shared["folder"])})
    else:
        with _servers_of_a_run() as running:
            yield running


@pytest.fixture(scope="session")
def template_database(servers: Servers) -> str:
    name = f"template_{secrets.token_hex(4)}"
    _administer(servers, sql.SQL("create database {}").format(sql.Identifier(name)))
    with connected(_named(servers.database_url, name)) as connection:
        migrate(connection)
    return name


@pytest.fixture
def own_database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """A migrated database that only this test uses, and whose schema it may change."""
    name = f"test_{secrets.token_hex(6)}"
    # In memory, the strategy `file_copy` takes half the time. On a disk, its checkpoints would take longer.
    strategy = "file_copy" if _MEMORY in servers.folder.parents else "wal_log"
    clone = sql.SQL("create database {} template {} strategy {}")
    names = sql.Identifier(name), sql.Identifier(template_database), sql.SQL(strategy)
    _administer(servers, clone.format(*names))
    yield _named(servers.database_url, name)
    _administer(servers, sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A migrated, empty database for this test. Folders whose tests only add rows replace this fixture, because a clone
    takes ten times as long as deleting rows."""
    return own_database_url


@pytest.fixture
def empty_database_url(servers: Servers) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    _administer(servers, sql.SQL("create database {}").format(sql.Identifier(name)))
    yield _named(servers.database_url, name)
    _administer(servers, sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which no process can listen while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def connection(database_url: str, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection]:
    if "tables_url" in request.fixturenames and database_url == request.getfixturevalue("tables_url"):
        yield request.getfixturevalue("tables_session")
    else:
        with psycopg.connect(database_url, autocommit=True) as opened:
            yield opened


@pytest.fixture
def topology_names() -> Topology:
    name = f"test.{secrets.token_hex(6)}"
    return Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")


@pytest.fixture(scope="session")
def declarer(servers: Servers) -> Iterator[Declarer]:
    with Declarer(servers.amqp_url) as opened:
        yield opened


@pytest.fixture
async def rabbit(servers: Servers) -> AsyncIterator[Rabbit]:
    async with await open_connection(servers.amqp_url, name="test") as connection:
        yield Rabbit(connection)


@pytest.fixture
def topology(declarer: Declarer, topology_names: Topology) -> Iterator[Topology]:
    declarer.declare(topology_names)
    yield topology_names
    declarer.delete(topology_names)


def _named(database_url: str, name: str) -> str:
    return urlunsplit(urlsplit(database_url)._replace(path=f"/{name}"))


def _administer(servers: Servers, statement: sql.Composed) -> None:
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(statement)
