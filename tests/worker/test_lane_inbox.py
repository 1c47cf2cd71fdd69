"""Lanes take turns in the worker's window."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from dispatcher.broker.consumer import Delivery
from dispatcher.broker.pointer import Pointer
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.turns import LaneWeights
from dispatcher.routing.breaker import CircuitBreaker
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.leases import Lease
from dispatcher.worker.in_flight_email import InFlightEmail
from dispatcher.worker.lane_inbox import Arrival, LaneInbox
from dispatcher.worker.window import URGENT_SHARE, Window
from tests.waiting import until
from tests.worker.scripted import ScriptedProvider

PREFETCH = 64


class Inbox:
    """An inbox, the batches that it handed out, and a window that is filled by what was handed out."""

    def __init__(self) -> None:
        self.inbox = LaneInbox(LaneWeights())
        breaker = CircuitBreaker(asyncio.get_running_loop().time, lambda *_: None)
        self.window = Window(Routes([Route(ScriptedProvider(), breaker)]), PREFETCH, self.inbox)
        self.leased: list[Arrival] = []
        self.task = asyncio.create_task(self.inbox.lease(self.handle, self.window))

    async def handle(self, batch: list[Arrival]) -> None:
        for arrival in batch:
            self.leased.append(arrival)
            lease = Lease(arrival.pointer.email_id, None, 1, 1, None, None)
            self.window.emails[lease.email_id] = InFlightEmail(
                lease, arrival.delivery, OnUncertain.HOLD, confirmed_at=0.0, leased_until=0.0
            )

    def arrive(self, lane: str, count: int) -> None:
        for _ in range(count):
            self.inbox.add(Arrival(Delivery(1, 1, b"", redelivered=False, lane=lane), Pointer(uuid4(), "k")))

    def free(self, count: int) -> None:
        for email_id in list(self.window.emails)[:count]:
            del self.window.emails[email_id]
        self.inbox.wake()

    @property
    def lanes(self) -> Counter[str]:
        return Counter(each.delivery.lane for each in self.leased)


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    """An inbox that leases."""
    made = Inbox()
    yield made
    made.task.cancel()


async def test_a_lane_alone_gets_the_whole_window(inbox: Inbox) -> None:
    inbox.arrive("bulk", 200)
    await until(lambda: len(inbox.leased) >= PREFETCH)

    assert inbox.lanes == {"bulk": PREFETCH}


async def test_freed_slots_go_to_the_lanes_by_weight(inbox: Inbox) -> None:
    inbox.arrive("bulk", 200)
    await until(lambda: len(inbox.leased) >= PREFETCH)
    inbox.leased.clear()

    inbox.arrive("normal", 200)
    inbox.free(50)
    await until(lambda: len(inbox.leased) >= 50)

    assert inbox.lanes == {"normal": 40, "bulk": 10}


async def test_the_urgent_lane_gets_slots_although_the_other_lanes_have_filled_the_window(inbox: Inbox) -> None:
    inbox.arrive("bulk", 200)
    await until(lambda: len(inbox.leased) >= PREFETCH)

    inbox.arrive("urgent", 200)
    inbox.arrive("normal", 200)
    await until(lambda: inbox.lanes["urgent"] > 0)

    assert inbox.lanes == {"bulk": PREFETCH, "urgent": PREFETCH // URGENT_SHARE}


async def test_what_is_not_leased_of_a_lane_can_be_taken_out_again(inbox: Inbox) -> None:
    inbox.arrive("bulk", PREFETCH + 3)
    await until(lambda: len(inbox.leased) >= PREFETCH)

    assert len(inbox.inbox.take_lane("bulk")) == 3
    assert inbox.inbox.take_lane("bulk") == []
