"""Fixtures of the recovery tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from dispatcher.store.connections import make_pool
from dispatcher.store.leases import LeaseStore
from tests.broker.rabbit import Rabbit, Taken
from tests.recovery.lost_workers import SLOT, WORKER, Host
from tests.relay.running import Start, settings_for, start
from tests.store.books import Books

__all__ = ["start"]


@pytest.fixture
async def host(tables_url: str, tmp_path: Path, books: Books) -> AsyncIterator[Host]:
    async with make_pool(tables_url, name=WORKER, size=2) as pool:
        yield Host(tables_url, tmp_path / "run", books, LeaseStore(pool, worker=WORKER, slot=SLOT))


@dataclass
class Relays:
    """Starts relays that publish to the test's queues."""

    begin: Start
    rabbit: Rabbit
    topology: Topology
    amqp_url: str
    url: str

    def settings(self, amqp_url: str | None = None, **given: str) -> Settings:
        return settings_for(amqp_url or self.amqp_url, self.url, self.topology, **given)

    async def start(self, amqp_url: str | None = None, **given: str) -> None:
        await self.begin(self.settings(amqp_url, **given))

    async def take(self, count: int = 1, *, dead: bool = False) -> list[Taken]:
        """Waits for this number of messages in the send queue, or the DLQ, and takes them."""
        return await self.rabbit.take_all(self.topology.dlq if dead else self.topology.queue, count)


@pytest.fixture
def relays(start: Start, servers: Servers, tables_url: str, topology: Topology, rabbit: Rabbit) -> Relays:
    return Relays(start, rabbit, topology, servers.amqp_url, tables_url)
