"""Tests how many emails a worker may lease in each state of the breaker."""

from __future__ import annotations

from uuid import uuid4

import pytest

from dispatcher.broker.consumer import Delivery
from dispatcher.domain.status import OnUncertain
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.routing.breaker import FIRST_OPEN_SECONDS, CircuitBreaker
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.leases import Lease
from dispatcher.worker.in_flight_email import EmailEvent, InFlightEmail
from dispatcher.worker.window import LARGE_PREFETCH, Window
from tests.worker.scripted import ScriptedProvider

PREFETCH = 8


class Scene:
    """A window, of eight emails by default, and the breaker of the only provider."""

    def __init__(self, prefetch: int = PREFETCH) -> None:
        self.now = 1000.0
        self.breaker = CircuitBreaker(lambda: self.now, lambda *_: None, jitter=lambda: 1.0)
        self.window = Window(Routes([Route(ScriptedProvider(), self.breaker)]), prefetch, BatchQueue[None]())

    def hold(self, count: int, *events: EmailEvent) -> None:
        """Adds this number of leased emails to the window, and applies the events to each email."""
        for _ in range(count):
            lease = Lease(uuid4(), None, 1, 1, None, None)
            message = Delivery(1, 1, b"", redelivered=False)
            email = InFlightEmail(lease, message, OnUncertain.HOLD, confirmed_at=0.0, leased_until=0.0)
            for event in events:
                email.on(event)
            self.window.emails[email.email_id] = email

    def fail(self) -> None:
        """Opens the breaker."""
        self.breaker.open(self.breaker.begin(), "bad credentials")

    def half_open(self) -> None:
        """Makes the breaker half open."""
        self.fail()
        self.now += FIRST_OPEN_SECONDS


ON_THE_WIRE = (EmailEvent.MARK, EmailEvent.SEND)


def test_every_in_flight_email_takes_a_slot_of_the_window() -> None:
    scene = Scene()

    scene.hold(2)
    scene.hold(3, *ON_THE_WIRE)

    assert scene.window.room() == PREFETCH - 5


@pytest.mark.parametrize(("waiting", "room"), [(1, 8), (8, 8), (10, 6), (16, 0)])
def test_waiting_emails_take_no_slot_of_the_window_while_the_ledger_has_slots(waiting: int, room: int) -> None:
    scene = Scene()

    scene.hold(waiting, EmailEvent.WAIT)

    assert scene.window.room() == room


@pytest.mark.parametrize(("waiting", "may_wait"), [(0, True), (6, True), (7, False), (16, False)])
def test_waiting_emails_leave_a_whole_window_and_its_urgent_part_for_other_emails(waiting: int, may_wait: bool) -> None:
    scene = Scene()

    scene.hold(waiting, EmailEvent.WAIT)

    assert scene.window.may_wait is may_wait
    assert not may_wait or scene.window.urgent_room() == PREFETCH + 1


def test_there_is_no_room_while_no_provider_may_be_tried() -> None:
    scene = Scene()

    scene.fail()

    assert (scene.window.room(), scene.window.is_probing()) == (0, False)


@pytest.mark.parametrize(
    ("events", "room"), [((), 0), ((EmailEvent.STOP,), 0), (ON_THE_WIRE, 1), ((EmailEvent.WAIT,), 1)], ids=repr
)
def test_a_probe_is_allowed_beside_emails_that_are_on_the_wire_or_waiting(
    events: tuple[EmailEvent, ...], room: int
) -> None:
    scene = Scene()
    scene.half_open()

    scene.hold(2, *events)

    assert (scene.window.room(), scene.window.is_probing()) == (room, True)


def test_no_probe_is_allowed_if_the_ledger_is_full() -> None:
    scene = Scene()
    scene.half_open()

    scene.hold(2 * PREFETCH, EmailEvent.WAIT)

    assert scene.window.room() == 0


@pytest.mark.parametrize(("held", "is_scarce"), [(6, False), (7, True), (8, True)])
def test_the_window_is_scarce_if_less_than_a_quarter_is_free(held: int, is_scarce: bool) -> None:
    scene = Scene()

    scene.hold(held, *ON_THE_WIRE)

    assert scene.window.is_scarce() is is_scarce


@pytest.mark.parametrize(("unsent", "on_the_wire", "room"), [(16, 32, 16), (16, 33, 0), (15, 48, 1), (63, 0, 0)])
def test_while_a_quarter_waits_to_be_sent_emails_are_leased_only_when_a_quarter_is_free(
    unsent: int, on_the_wire: int, room: int
) -> None:
    scene = Scene(LARGE_PREFETCH)

    scene.hold(unsent)
    scene.hold(on_the_wire, *ON_THE_WIRE)

    assert scene.window.room() == room


def test_a_lease_does_not_wait_long_for_a_quarter_to_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatcher.worker.window.LEASE_WAIT_SECONDS", 0.0)
    scene = Scene(LARGE_PREFETCH)

    scene.hold(63)

    assert scene.window.room() == 1


def test_no_lease_is_urgent_while_a_quarter_waits_to_be_sent() -> None:
    scene = Scene(LARGE_PREFETCH)

    scene.hold(16)
    scene.hold(48, *ON_THE_WIRE)

    assert not scene.window.is_scarce()
