"""Runs relays in the test's event loop. Tests observe them through PostgreSQL and RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from uuid import UUID

import psycopg
import pytest

from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology
from dispatcher.config import Settings, load
from dispatcher.dev.servers import Servers
from dispatcher.domain.status import Status
from dispatcher.host.process_table import ProcessSlot, ProcessTable
from dispatcher.recovery.lost_message import LostMessages
from dispatcher.relay.notifications import POLL_SECONDS, QUIET_SECONDS
from dispatcher.relay.publish_loop import PublishLoop
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.supervisor.relay_process import leader_services
from tests.broker.rabbit import Rabbit
from tests.store.books import Books
from tests.store.results import lease_one, result
from tests.waiting import until

LOOKS = 6
"""More statements than the relay executes in one round."""
MARK_AFTER_SECONDS = 0.5
"""Shorter than in production, so that the tests are fast."""

Start = Callable[..., Awaitable[PublishLoop]]


@pytest.fixture
def settings(servers: Servers, tables_url: str, topology: Topology) -> Settings:
    given = {
        "DATABASE_URL": tables_url,
        "AMQP_URL": servers.amqp_url,
        "EXCHANGE": topology.exchange,
        "QUEUE": topology.queue,
        "DLQ": topology.dlq,
    }
    return load({f"DISPATCHER_{name}": value for name, value in given.items()})


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def run(
            settings: Settings, *, poll_seconds: float = POLL_SECONDS, quiet_seconds: float = QUIET_SECONDS
        ) -> PublishLoop:
            publisher = Publisher(settings.amqp_url, settings.exchange, name="test relay")
            publishing = PublishLoop(
                settings,
                publisher,
                leader_services(settings, publisher, lambda: ()),
                free_process_slot(),
                poll_seconds=poll_seconds,
                mark_after_seconds=MARK_AFTER_SECONDS,
                quiet_seconds=quiet_seconds,
            )
            task = asyncio.create_task(publishing.run())
            stack.push_async_callback(publisher.close)

            async def end() -> None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            stack.push_async_callback(end)
            return publishing

        yield run


class Relay:
    def __init__(self, settings: Settings, books: Books, rabbit: Rabbit, start: Start) -> None:
        self.settings = settings
        self.books = books
        self.rabbit = rabbit
        self._start = start

    async def start(self, settings: Settings | None = None, **options: float) -> PublishLoop:
        return await self._start(settings or self.settings, **options)

    async def leads(self) -> int:
        """Waits until a relay leads; returns the pid of its session."""
        return await until(lambda: leader(self.books) or 0)

    async def take(self, count: int, lane: str = "normal") -> list[UUID]:
        """Takes all messages of a lane, each about one email, of which there must be so many; returns the emails."""
        messages = await self.rabbit.take_all(self.settings.queue_of(lane), count)
        return [message.pointer.email_id for message in messages]

    async def take_some(self, count: int, lane: str = "normal") -> list[UUID]:
        """Takes the next messages of a lane that may have more; returns the emails."""
        messages = await self.rabbit.take_all_within(self.settings.queue_of(lane), count)
        return [message.pointer.email_id for message in messages]

    async def is_empty(self, lane: str = "normal") -> bool:
        return await self.rabbit.take(self.settings.queue_of(lane)) is None

    def due(self, tenant_id: str | None = None) -> set[UUID]:
        rows = self.books.select("select email_id, tenant_id from email_log where publish_due_at is not null")
        return {row["email_id"] for row in rows if tenant_id in (None, row["tenant_id"])}

    async def dead_letter(self, store: LeaseStore, status: Status = Status.FAILED, **fields: str) -> UUID:
        lease = await lease_one(store, self.books)
        await store.record([result(lease, status, **fields)])
        return lease.email_id


@pytest.fixture
def relay(settings: Settings, tables_session: psycopg.Connection, rabbit: Rabbit, start: Start) -> Relay:
    return Relay(settings, Books(tables_session), rabbit, start)


def free_process_slot() -> ProcessSlot:
    return ProcessTable(["relay"]).take_slot("relay", 0)


def leader(books: Books) -> int | None:
    """The pid of the leading relay's session; None if no relay leads."""
    (found,) = books.select("select named_lock_holder('relay') as pid")
    pid: int | None = found["pid"]
    return pid


async def republish_lost(settings: Settings) -> None:
    """Searches once for lost messages."""
    publisher = Publisher(settings.amqp_url, settings.exchange, name="test relay")
    async with await connect_async(settings.database_url, name="test relay") as session:
        await LostMessages(settings, Outbox(session), publisher.find).run_once()
    await publisher.close()


async def next_round(books: Books) -> None:
    """Waits until the relay has read all rows that were committed before the call."""
    statement = "select query_start from pg_stat_activity where datname = current_database() and application_name = %s"

    (now,) = books.select("select pg_catalog.clock_timestamp() as instant")
    seen: set[datetime] = set()

    def have_been_two_rounds() -> bool:
        looks = {row["query_start"] for row in books.select(statement, "dispatcher relay")}
        seen.update(at for at in looks if at is not None and at > now["instant"])
        return len(seen) >= LOOKS

    # An idle relay executes a few statements per second.
    await until(have_been_two_rounds)
