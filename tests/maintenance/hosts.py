"""Hosts whose monitors share one database: real tables, a DLQ whose depth a test sets, channels with ledgers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dispatcher.alerts.contract import NotDelivered
from dispatcher.domain.alert import Notice
from dispatcher.errors import BrokerUnavailable
from dispatcher.maintenance.alert_book import AlertBook
from dispatcher.maintenance.announcing import Announcer
from dispatcher.maintenance.dlq_alert import DlqAlert
from dispatcher.store.alerts import AlertStore
from dispatcher.store.retention import Retention
from tests.waiting import until

DLQ = "test.dlq"
UNDECIDED_DAYS = 180


@dataclass
class Depth:
    """What RabbitMQ would report; None where it does not answer."""

    messages: int | None = 0

    async def __call__(self) -> int:
        """See `maintenance.dlq_depth.Depth`."""
        if self.messages is None:
            raise BrokerUnavailable("RabbitMQ's management API answers 503 to ann@example.org.")
        return self.messages


@dataclass
class Ear:
    """A channel with a ledger.

    Attributes:
        failures: How many notices it does not take from now on.
        heard: What it took.
        refused: What it did not.
    """

    name: str = "ear"
    failures: int = 0
    heard: list[Notice] = field(default_factory=list)
    refused: list[Notice] = field(default_factory=list)

    async def send(self, notice: Notice) -> str:
        """See `alerts.contract.Channel`."""
        if self.failures:
            self.failures -= 1
            self.refused.append(notice)
            raise NotDelivered("it answered 503")
        self.heard.append(notice)
        return "heard"

    @property
    def phases(self) -> list[str]:
        """What it took, in order."""
        return [f"{notice.alert.kind} {notice.phase}" for notice in self.heard]


@dataclass(frozen=True)
class Host:
    """A monitor's tasks, but for the clock: the test says when to look."""

    watch: DlqAlert
    announcers: list[asyncio.Task[None]]
    book: AlertBook
    store: AlertStore

    async def look(self) -> None:
        """One look; returns when what was found is told, or waits for its next try."""
        await self.watch.run_once()
        for _ in range(3):
            await asyncio.sleep(0)


@asynccontextmanager
async def host(
    database_url: str,
    depth: Depth,
    *ears: Ear,
    name: str = "host-1",
    reminder_seconds: float = 3600,
    interval_seconds: float = 1,
    store_seconds: float = 15,
    after_seconds: float = 3600,
) -> AsyncIterator[Host]:
    """A host that is up for the length of a block; leaving it is as kill -9 for what it holds."""
    store = AlertStore(
        database_url,
        queue=DLQ,
        holder=name,
        host=name,
        retention=Retention(30, 400, 0, 0, UNDECIDED_DAYS),
        idle_seconds=60,
        answer_seconds=store_seconds,
    )
    book = AlertBook(store)
    watch = DlqAlert(DLQ, depth, store, book, host=name, interval_seconds=interval_seconds, after_seconds=after_seconds)
    announcers = [
        Announcer(ear, watch, book, reminder_seconds=reminder_seconds, first_wait_seconds=0.001) for ear in ears
    ]
    tasks = [asyncio.create_task(announcer.run()) for announcer in announcers]
    try:
        yield Host(watch, tasks, book, store)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()


async def hears(ear: Ear, *phases: str) -> None:
    """Waits until a channel took exactly these notices, in any order."""
    await until(lambda: len(ear.heard) >= len(phases))
    assert Counter(ear.phases) == Counter(phases)
