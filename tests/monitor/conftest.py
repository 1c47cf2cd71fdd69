"""Fixtures of the monitor tests: the event loop, a second RabbitMQ client, and a receiver of notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
import uvloop

from dispatcher.broker.connection import open_connection
from dispatcher.dev.servers import Servers
from dispatcher.domain.alert import Alert, Kind, Notice, Phase
from tests.broker.rabbit import Rabbit
from tests.monitor.receiver import Receiver, receiving, write_ca


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the tests in the monitor's event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def rabbit(servers: Servers) -> AsyncIterator[Rabbit]:
    """A RabbitMQ client that is separate from the monitor's."""
    async with await open_connection(servers.amqp_url, name="test") as connection:
        yield Rabbit(connection)


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    """A private certificate authority, which no client trusts by default."""
    return trustme.CA()


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> Path:
    return write_ca(ca, tmp_path)


@pytest.fixture
def receiver(ca: trustme.CA) -> Iterator[Receiver]:
    """A webhook receiver whose certificate is for 127.0.0.1 and for a host name that no resolver knows."""
    with receiving(ca, "127.0.0.1", "alerts.example.com") as running:
        yield running


@pytest.fixture
def notice() -> Notice:
    """A notice about three dead letters."""
    at = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
    alert = Alert(
        Kind.DEAD_LETTERS,
        True,
        "email.dispatcher.dlq",
        at,
        "host-1",
        count=3,
        oldest_age_seconds=61.25,
        correlation_ids=("order-1", "order-2"),
    )
    return Notice("alert_1", Phase.RAISED, at, alert)
