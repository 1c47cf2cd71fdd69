from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Rabbit
from tests.providers.http_places import SendGridPlace, sendgrid_place
from tests.store.books import Books
from tests.worker.bench import Bench


@pytest.fixture
async def bench(
    servers: Servers, tables_url: str, topology: Topology, tmp_path: Path, books: Books
) -> AsyncIterator[Bench]:
    async with await open_connection(servers.amqp_url, name="test") as connection:
        made = Bench(servers, tables_url, topology, tmp_path / "run", books, Rabbit(connection))
        yield made
        await made.close()


@pytest.fixture
async def broker(servers: Servers) -> AsyncIterator[Proxy]:
    async with Proxy(servers.amqp_url) as running:
        yield running


@pytest.fixture
async def postgres(tables_url: str) -> AsyncIterator[Proxy]:
    """A proxy to PostgreSQL that a test can interrupt. The server still completes running statements."""
    async with Proxy(tables_url) as running:
        yield running


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[SendGridPlace]:
    async with sendgrid_place(tmp_path / "double") as opened:
        yield opened
