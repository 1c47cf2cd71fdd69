"""Monitors of several hosts with one real database, a DLQ depth that the test sets, and channels that record
notices."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dispatcher.domain.alert import Alert, NotDelivered, Notice
from dispatcher.errors import BrokerUnavailable
from dispatcher.monitor.alert_checks import AlertChecks
from dispatcher.monitor.alert_sender import AlertSender
from dispatcher.monitor.alert_state import AlertState
from dispatcher.store.alerts import AlertStore
from dispatcher.store.retention import Retention
from tests.waiting import until, until_answer

DLQ = "test.dlq"
UNDECIDED_DAYS = 180


@dataclass
class Depth:
    """The DLQ depth that the test sets. With None, a call raises an error, as if RabbitMQ did not answer."""

    messages: int | None = 0

    async def __call__(self) -> int:
        if self.messages is None:
            raise BrokerUnavailable("RabbitMQ's management API answers 503 to ann@example.org.")
        return self.messages


@dataclass
class RecordingChannel:
    name: str = "channel"
    failures: int = 0
    accepted: list[Notice] = field(default_factory=list)
    refused: list[Notice] = field(default_factory=list)

    async def send(self, notice: Notice) -> str:
        if self.failures:
            self.failures -= 1
            self.refused.append(notice)
            raise NotDelivered("the receiver answered 503")
        self.accepted.append(notice)
        return "accepted"

    @property
    def phases(self) -> list[str]:
        return [f"{notice.alert.kind} {notice.phase}" for notice in self.accepted]


@dataclass(frozen=True)
class Host:
    """The alerting parts of one monitor, which check only when the test asks. `channel`: its first channel."""

    checks: AlertChecks
    state: AlertState
    store: AlertStore
    depth: Depth
    channel: RecordingChannel

    async def run_once(self) -> None:
        """Checks once; returns when each due notice was accepted or waits for a retry."""
        await self.checks.run_once()
        for _ in range(3):
            await asyncio.sleep(0)

    async def check(self, *phases: str, messages: int | None = 0) -> list[Alert]:
        """Checks once while the DLQ has this depth. Then the channel has accepted exactly these notices; returns their
        alerts."""
        self.depth.messages = messages
        await self.run_once()
        await accepts(self.channel, *phases)
        return [notice.alert for notice in self.channel.accepted]

    async def until_announced(self) -> Alert:
        await until_answer(self.run_once, lambda _: self.channel.accepted)
        return self.channel.accepted[0].alert

    async def until_reconnected(self) -> None:
        await until_answer(self.run_once, lambda _: not self.state.is_alone)


@asynccontextmanager
async def host(
    database_url: str,
    *given: RecordingChannel,
    name: str = "host-1",
    reminder_seconds: float = 3600,
    interval_seconds: float = 1,
    store_seconds: float = 15,
    after_seconds: float = 3600,
) -> AsyncIterator[Host]:
    """Runs a host's monitor during the block. The end of the block has the effect of SIGKILL."""
    store = AlertStore(
        database_url,
        queue=DLQ,
        holder=name,
        host=name,
        retention=Retention(30, 400, 0, 0, UNDECIDED_DAYS),
        idle_seconds=60,
        answer_seconds=store_seconds,
    )
    depth, channels = Depth(), given or (RecordingChannel(),)
    state = AlertState(store)
    checks = AlertChecks(
        DLQ,
        depth,
        store,
        state,
        host=name,
        interval_seconds=interval_seconds,
        after_seconds=after_seconds,
        reminder_seconds=reminder_seconds,
        providers=["smtp"],
    )
    options: dict[str, float] = {"reminder_seconds": reminder_seconds, "first_wait_seconds": 0.001}
    senders = [AlertSender(channel, checks, state, **options) for channel in channels]
    tasks = [asyncio.create_task(sender.run()) for sender in senders]
    try:
        yield Host(checks, state, store, depth, channels[0])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()


async def accepts(channel: RecordingChannel, *phases: str) -> None:
    await until(lambda: len(channel.accepted) >= len(phases))
    assert Counter(channel.phases) == Counter(phases)
