"""How much a worker may lease, without servers."""

from __future__ import annotations

from uuid import uuid4

import pytest

from dispatcher.broker.consumer import Delivery
from dispatcher.domain.status import OnUncertain
from dispatcher.host.batches import Batches
from dispatcher.routing.breaker import FIRST_OPEN_SECONDS, Breaker
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.leases import Lease
from dispatcher.worker.in_flight_email import Event, InFlightEmail
from dispatcher.worker.window import Window
from tests.worker.scripted import ScriptedProvider

PREFETCH = 8


class Scene:
    """A window of eight emails, and the breaker of the only provider."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.breaker = Breaker(lambda: self.now, lambda *_: None, jitter=lambda: 1.0)
        self.window = Window(Routes([Route(ScriptedProvider(), self.breaker)]), PREFETCH, Batches[None]())

    def hold(self, count: int, *events: Event) -> None:
        """So many emails are leased, and that happens to them."""
        for _ in range(count):
            lease = Lease(uuid4(), None, 1, 1, None, None)
            message = Delivery(1, 1, b"", redelivered=False)
            email = InFlightEmail(lease, message, OnUncertain.HOLD, confirmed_at=0.0, leased_until=0.0)
            for event in events:
                email.on(event)
            self.window.emails[email.email_id] = email

    def fail(self) -> None:
        """The provider cannot be used for a while."""
        self.breaker.open(self.breaker.begin(), "bad credentials")

    def half_open(self) -> None:
        """It failed, and may be probed."""
        self.fail()
        self.now += FIRST_OPEN_SECONDS


ON_THE_WIRE = (Event.NAME, Event.LEAVE)


def test_every_email_under_way_takes_room() -> None:
    scene = Scene()

    scene.hold(2)
    scene.hold(3, *ON_THE_WIRE)

    assert scene.window.room() == PREFETCH - 5


@pytest.mark.parametrize(("waiting", "room"), [(1, 8), (8, 8), (10, 6), (16, 0)])
def test_emails_that_wait_take_no_room_from_others_up_to_the_slots_of_the_ledger(waiting: int, room: int) -> None:
    scene = Scene()

    scene.hold(waiting, Event.WAIT)

    assert scene.window.room() == room


def test_there_is_no_room_while_no_provider_may_be_tried() -> None:
    scene = Scene()

    scene.fail()

    assert (scene.window.room(), scene.window.is_probing()) == (0, False)


@pytest.mark.parametrize(
    ("events", "room"), [((), 0), ((Event.STOP,), 0), (ON_THE_WIRE, 1), ((Event.WAIT,), 1)], ids=repr
)
def test_a_probe_has_room_beside_what_is_on_the_wire_or_waits(events: tuple[Event, ...], room: int) -> None:
    scene = Scene()
    scene.half_open()

    scene.hold(2, *events)

    assert (scene.window.room(), scene.window.is_probing()) == (room, True)


def test_not_even_a_probe_has_room_where_the_ledger_is_full() -> None:
    scene = Scene()
    scene.half_open()

    scene.hold(2 * PREFETCH, Event.WAIT)

    assert scene.window.room() == 0


@pytest.mark.parametrize(("held", "is_scarce"), [(6, False), (7, True), (8, True)])
def test_room_is_scarce_where_less_than_a_quarter_of_the_window_is_free(held: int, is_scarce: bool) -> None:
    scene = Scene()

    scene.hold(held)

    assert scene.window.is_scarce() is is_scarce
