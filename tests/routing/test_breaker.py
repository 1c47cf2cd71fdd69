"""When a provider may be tried, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.routing.breaker import FAILURES_IN_A_ROW, FIRST_OPEN_SECONDS, LONGEST_OPEN_SECONDS, Breaker, State


@dataclass
class Scene:
    """A breaker, its clock, and what it told."""

    now: float = 1000.0
    told: list[tuple[State, str | None]] = field(default_factory=list)
    breaker: Breaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = Breaker(
            lambda: self.now, lambda state, reason, _: self.told.append((state, reason)), jitter=lambda: 1.0
        )

    def fail_often(self) -> None:
        """As many failures as open it."""
        for _ in range(FAILURES_IN_A_ROW):
            self.breaker.begin()
            self.breaker.fail("connection_failed")


def test_closed_it_bounds_nothing() -> None:
    scene = Scene()

    assert (scene.breaker.state, scene.breaker.room, scene.breaker.wait_seconds) == (State.CLOSED, None, 0.0)


def test_failures_in_a_row_open_it_and_an_answer_between_them_does_not() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW - 1):
        scene.breaker.fail("server_error")
    scene.breaker.succeed()
    scene.breaker.fail("server_error")
    assert scene.breaker.state is State.CLOSED

    scene.fail_often()

    assert (scene.breaker.state, scene.breaker.room) == (State.OPEN, 0)
    assert scene.breaker.reason == "connection_failed"


def test_after_its_time_one_email_probes_and_its_success_closes_it() -> None:
    scene = Scene()
    scene.fail_often()
    scene.now += FIRST_OPEN_SECONDS

    assert (scene.breaker.state, scene.breaker.room) == (State.HALF_OPEN, 1)
    scene.breaker.begin()
    assert scene.breaker.room == 0
    scene.breaker.succeed()

    assert scene.breaker.state is State.CLOSED
    assert scene.told[-1] == (State.CLOSED, None)


def test_a_probe_that_fails_opens_it_for_longer_up_to_a_bound() -> None:
    scene = Scene()
    scene.fail_often()
    waits = []
    for _ in range(10):
        waits.append(scene.breaker.wait_seconds)
        scene.now += scene.breaker.wait_seconds
        assert scene.breaker.state is State.HALF_OPEN
        scene.breaker.begin()
        scene.breaker.fail("server_error")

    assert waits[:3] == [FIRST_OPEN_SECONDS, 2 * FIRST_OPEN_SECONDS, 4 * FIRST_OPEN_SECONDS]
    assert waits[-1] == LONGEST_OPEN_SECONDS


def test_a_probe_that_ended_without_a_word_makes_room_for_another() -> None:
    scene = Scene()
    scene.fail_often()
    scene.now += FIRST_OPEN_SECONDS
    assert scene.breaker.state is State.HALF_OPEN
    scene.breaker.begin()

    scene.breaker.give_up()

    assert scene.breaker.room == 1


def test_a_fault_opens_it_at_once() -> None:
    scene = Scene()

    scene.breaker.open("bad credentials")

    assert (scene.breaker.state, scene.breaker.reason) == (State.OPEN, "bad credentials")


def test_throttling_pauses_as_long_as_the_provider_asks_and_then_bounds_nothing() -> None:
    scene = Scene()

    scene.breaker.pause(90.0, "throttled")
    assert (scene.breaker.state, scene.breaker.room, scene.breaker.wait_seconds) == (State.PAUSED, 0, 90.0)
    scene.now += 90.0

    assert (scene.breaker.state, scene.breaker.room) == (State.CLOSED, None)


def test_a_hundred_emails_throttled_at_once_pause_it_once() -> None:
    scene = Scene()

    for _ in range(100):
        scene.breaker.pause(None, "throttled")

    assert scene.told == [(State.PAUSED, "throttled")]
    assert scene.breaker.wait_seconds < 2.0


def test_the_longest_pause_that_was_asked_for_counts() -> None:
    scene = Scene()

    scene.breaker.pause(5.0, "throttled")
    scene.breaker.pause(60.0, "throttled")
    scene.breaker.pause(1.0, "throttled")

    assert scene.breaker.wait_seconds == 60.0
