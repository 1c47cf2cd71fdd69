"""Tests how many emails a worker may lease in each state of the breaker, and how lanes take turns in the window."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final
from uuid import uuid4

import pytest

from dispatcher.broker.consumer import Delivery
from dispatcher.broker.pointer import Pointer
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.turns import LaneWeights
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.routing.breaker import FIRST_OPEN_SECONDS, CircuitBreaker
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.leases import Lease
from dispatcher.worker.in_flight_email import EmailEvent, InFlightEmail
from dispatcher.worker.lane_inbox import Arrival, LaneInbox
from dispatcher.worker.window import LARGE_PREFETCH, URGENT_SHARE, Wakeable, Window
from tests.waiting import until
from tests.worker.scripted import ScriptedProvider

PREFETCH = 8
ON_THE_WIRE = (EmailEvent.MARK, EmailEvent.SEND)
WAITING = (EmailEvent.WAIT,)


class Scene:
    """A window, of eight emails by default, and the breaker of the only provider."""

    def __init__(self, prefetch: int = PREFETCH, inbox: Wakeable | None = None) -> None:
        self.now = 1000.0
        self.breaker = CircuitBreaker(lambda: self.now, lambda *_: None, jitter=lambda: 1.0)
        routes = Routes([Route(ScriptedProvider(), self.breaker)])
        self.window = Window(routes, prefetch, inbox or BatchQueue[None]())

    def hold(self, count: int, *events: EmailEvent) -> None:
        for _ in range(count):
            lease = Lease(uuid4(), None, 1, 1, None, None)
            message = Delivery(1, 1, b"", redelivered=False)
            email = InFlightEmail(lease, message, OnUncertain.HOLD, confirmed_at=0.0, leased_until=0.0)
            for event in events:
                email.on(event)
            self.window.emails[email.email_id] = email

    def half_open(self) -> None:
        self.breaker.open(self.breaker.begin(), "bad credentials")
        self.now += FIRST_OPEN_SECONDS


@pytest.mark.parametrize(
    ("prefetch", "unsent", "on_the_wire", "waiting", "room"),
    [
        *((8, *held) for held in [(2, 3, 0, 3), (0, 0, 1, 8), (0, 0, 8, 8), (0, 0, 10, 6), (0, 0, 16, 0)]),
        *((LARGE_PREFETCH, *held) for held in [(16, 32, 0, 16), (16, 33, 0, 0), (15, 48, 0, 1), (63, 0, 0, 0)]),
    ],
)
def test_waiting_emails_take_a_slot_of_the_ledger_only_and_of_a_large_window_only_a_free_quarter_is_leased(
    prefetch: int, unsent: int, on_the_wire: int, waiting: int, room: int
) -> None:
    scene = Scene(prefetch)

    scene.hold(unsent)
    scene.hold(on_the_wire, *ON_THE_WIRE)
    scene.hold(waiting, *WAITING)

    assert scene.window.room() == room


@pytest.mark.parametrize(("waiting", "may_wait"), [(0, True), (6, True), (7, False), (16, False)])
def test_waiting_emails_leave_a_whole_window_and_its_urgent_part_for_other_emails(waiting: int, may_wait: bool) -> None:
    scene = Scene()

    scene.hold(waiting, *WAITING)

    assert scene.window.may_wait is may_wait
    assert not may_wait or scene.window.urgent_room() == PREFETCH + 1


def test_there_is_no_room_while_no_provider_may_be_tried() -> None:
    scene = Scene()

    scene.breaker.open(scene.breaker.begin(), "bad credentials")

    assert (scene.window.room(), scene.window.is_probing()) == (0, False)


@pytest.mark.parametrize(
    ("count", "events", "room"),
    [(2, (), 0), (2, (EmailEvent.STOP,), 0), (2, ON_THE_WIRE, 1), (2, WAITING, 1), (2 * PREFETCH, WAITING, 0)],
    ids=["unsent", "stopped", "on the wire", "waiting", "full ledger"],
)
def test_a_probe_is_allowed_while_the_ledger_has_slots(count: int, events: tuple[EmailEvent, ...], room: int) -> None:
    scene = Scene()
    scene.half_open()

    scene.hold(count, *events)

    assert (scene.window.room(), scene.window.is_probing()) == (room, True)


@pytest.mark.parametrize(
    ("prefetch", "unsent", "on_the_wire", "is_scarce"),
    [(8, 0, 6, False), (8, 0, 7, True), (8, 0, 8, True), (LARGE_PREFETCH, 16, 48, False)],
)
def test_the_window_is_scarce_if_less_than_a_quarter_is_free_unless_a_quarter_waits_to_be_sent(
    prefetch: int, unsent: int, on_the_wire: int, is_scarce: bool
) -> None:
    scene = Scene(prefetch)

    scene.hold(unsent)
    scene.hold(on_the_wire, *ON_THE_WIRE)

    assert scene.window.is_scarce() is is_scarce


def test_a_lease_does_not_wait_long_for_a_quarter_to_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatcher.worker.window.LEASE_WAIT_SECONDS", 0.0)
    scene = Scene(LARGE_PREFETCH)

    scene.hold(63)

    assert scene.window.room() == 1


WIDE: Final = 64


class Inbox:
    """An inbox, the batches that it handed out, and a window that is filled by what was handed out."""

    def __init__(self) -> None:
        self.inbox = LaneInbox(LaneWeights())
        self.scene = Scene(WIDE, self.inbox)
        self.leased: list[str] = []
        self.task = asyncio.create_task(self.inbox.lease(self.handle, self.scene.window))

    async def handle(self, batch: list[Arrival]) -> None:
        self.leased += [arrival.delivery.lane for arrival in batch]
        self.scene.hold(len(batch))

    async def arrive(self, lane: str, count: int, *, until_leased: int = 0) -> None:
        for _ in range(count):
            self.inbox.add(Arrival(Delivery(1, 1, b"", redelivered=False, lane=lane), Pointer(uuid4(), "k")))
        await until(lambda: len(self.leased) >= until_leased)

    def free(self, count: int) -> None:
        for email_id in list(self.scene.window.emails)[:count]:
            del self.scene.window.emails[email_id]
        self.inbox.wake()


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    made = Inbox()
    yield made
    made.task.cancel()


async def test_a_lane_alone_gets_the_whole_window_and_what_is_not_leased_can_be_taken_out(inbox: Inbox) -> None:
    await inbox.arrive("bulk", WIDE + 3, until_leased=WIDE)

    assert inbox.leased == ["bulk"] * WIDE
    assert len(inbox.inbox.take_lane("bulk")) == 3
    assert inbox.inbox.take_lane("bulk") == []


async def test_freed_slots_go_to_the_lanes_by_weight(inbox: Inbox) -> None:
    await inbox.arrive("bulk", 200, until_leased=WIDE)
    inbox.leased.clear()

    await inbox.arrive("normal", 200)
    inbox.free(50)
    await until(lambda: len(inbox.leased) >= 50)

    assert Counter(inbox.leased) == {"normal": 40, "bulk": 10}


async def test_the_urgent_lane_gets_slots_although_the_other_lanes_have_filled_the_window(inbox: Inbox) -> None:
    await inbox.arrive("bulk", 200, until_leased=WIDE)

    await inbox.arrive("urgent", 200)
    await inbox.arrive("normal", 200)
    await until(lambda: "urgent" in inbox.leased)

    assert Counter(inbox.leased) == {"bulk": WIDE, "urgent": WIDE // URGENT_SHARE}
