"""Fixtures of the monitor tests: the event loop, and a second RabbitMQ client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from dispatcher.broker.connection import open_connection
from dispatcher.dev.servers import Servers
from tests.broker.rabbit import Rabbit


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the tests in the monitor's event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def rabbit(servers: Servers) -> AsyncIterator[Rabbit]:
    """A RabbitMQ client that is separate from the monitor's."""
    async with await open_connection(servers.amqp_url, name="test") as connection:
        yield Rabbit(connection)
