"""When a provider may be tried, by a clock that the test moves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from dispatcher.routing.breaker import (
    DEFAULT_PAUSE_SECONDS,
    FAILURES_IN_A_ROW,
    FIRST_OPEN_SECONDS,
    LONGEST_OPEN_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Breaker,
    State,
)


@dataclass
class Scene:
    """A breaker, its clock, and what it told."""

    now: float = 1000.0
    window: int = 1
    told: list[tuple[State, str | None]] = field(default_factory=list)
    breaker: Breaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = Breaker(
            lambda: self.now,
            lambda state, reason, _: self.told.append((state, reason)),
            window=self.window,
            jitter=lambda: 1.0,
        )

    def fail_often(self) -> None:
        """As many failures as open it."""
        for _ in range(FAILURES_IN_A_ROW):
            self.fail("connection_failed")

    def fail(self, reason: str = "server_error") -> None:
        """An email is tried, and the provider fails as a whole."""
        self.breaker.fail(self.breaker.begin(), reason)

    def throttle(self, seconds: float | None) -> None:
        """An email is tried, and the provider asks us to slow down."""
        self.breaker.pause(self.breaker.begin(), seconds, "throttled")

    def half_open(self) -> None:
        """It failed, and its time is over."""
        self.fail_often()
        self.now += FIRST_OPEN_SECONDS
        assert self.breaker.state is State.HALF_OPEN


@pytest.mark.parametrize("seconds", [2.005, 2.015])
def test_there_is_nothing_to_wait_for_only_once_the_end_of_the_wait_was_told(seconds: float) -> None:
    """However fast the clock goes: who was told of nothing and has no time to wait for would wait for ever."""
    clock = itertools.count(1000.0, 0.01)
    told: list[State] = []
    breaker = Breaker(lambda: next(clock), lambda state, _reason, _seconds: told.append(state))
    breaker.pause(breaker.begin(), seconds, "throttled")

    while breaker.wait_seconds:
        assert told == [State.PAUSED]

    assert told == [State.PAUSED, State.CLOSED]


def test_closed_it_bounds_nothing() -> None:
    scene = Scene()

    assert (scene.breaker.state, scene.breaker.room, scene.breaker.wait_seconds) == (State.CLOSED, None, 0.0)


def test_failures_in_a_row_open_it_and_an_answer_between_them_does_not() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW - 1):
        scene.fail()
    scene.breaker.succeed(scene.breaker.begin())
    scene.fail()
    assert scene.breaker.state is State.CLOSED

    scene.fail_often()

    assert (scene.breaker.state, scene.breaker.room) == (State.OPEN, 0)
    assert scene.breaker.reason == "connection_failed"


def test_after_its_time_one_email_probes_and_its_success_closes_it() -> None:
    scene = Scene()
    scene.half_open()

    assert scene.breaker.room == 1
    probe = scene.breaker.begin()
    assert scene.breaker.room == 0
    scene.breaker.succeed(probe)

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
        scene.fail()

    assert waits[:3] == [FIRST_OPEN_SECONDS, 2 * FIRST_OPEN_SECONDS, 4 * FIRST_OPEN_SECONDS]
    assert waits[-1] == LONGEST_OPEN_SECONDS


def test_a_probe_that_ended_without_a_word_makes_room_for_another() -> None:
    scene = Scene()
    scene.half_open()
    probe = scene.breaker.begin()

    scene.breaker.give_up(probe)

    assert scene.breaker.room == 1


def test_what_began_before_it_opened_judges_no_probe() -> None:
    scene = Scene()
    slow, silent, faulty, stopped = (scene.breaker.begin() for _ in range(4))
    scene.half_open()
    probe = scene.breaker.begin()

    scene.breaker.fail(slow, "timeout_before_send")
    scene.breaker.miss(silent, "outcome_unknown")
    scene.breaker.open(faulty, "bad credentials")
    scene.breaker.give_up(stopped)

    assert (scene.breaker.state, scene.breaker.room) == (State.HALF_OPEN, 0)
    scene.breaker.succeed(probe)
    assert scene.breaker.state is State.CLOSED


def test_the_last_email_that_began_before_it_opened_judges_no_probe() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW - 1):
        scene.fail()
    opening, last = scene.breaker.begin(), scene.breaker.begin()
    scene.breaker.fail(opening, "server_error")
    scene.now += FIRST_OPEN_SECONDS

    scene.breaker.fail(last, "server_error")

    assert (scene.breaker.state, scene.breaker.room) == (State.HALF_OPEN, 1)


def test_half_open_the_probe_alone_may_go_on() -> None:
    scene = Scene()
    slow = scene.breaker.begin()
    assert scene.breaker.may_go_on(slow)
    scene.half_open()

    probe = scene.breaker.begin()

    assert (scene.breaker.may_go_on(probe), scene.breaker.may_go_on(slow)) == (True, False)


def test_what_began_before_it_opened_does_not_open_it_again() -> None:
    scene = Scene()
    slow = [scene.breaker.begin() for _ in range(100)]
    scene.half_open()
    scene.breaker.succeed(scene.breaker.begin())

    for trial in slow:
        scene.breaker.fail(trial, "timeout_before_send")

    assert scene.breaker.state is State.CLOSED


def test_an_answer_of_any_age_closes_it_when_its_time_is_over() -> None:
    scene = Scene()
    slow = scene.breaker.begin()
    scene.half_open()

    scene.breaker.succeed(slow)

    assert scene.breaker.state is State.CLOSED


@pytest.mark.parametrize(("window", "silences"), [(1, FAILURES_IN_A_ROW), (256, 256)])
def test_a_window_of_silence_opens_it(window: int, silences: int) -> None:
    scene = Scene(window=window)
    for _ in range(silences - 1):
        scene.breaker.miss(scene.breaker.begin(), "outcome_unknown")
    assert scene.breaker.state is State.CLOSED

    scene.breaker.miss(scene.breaker.begin(), "outcome_unknown")

    assert (scene.breaker.state, scene.breaker.reason) == (State.OPEN, "outcome_unknown")


def test_silence_neither_ends_a_row_of_failures_nor_lets_a_probe_pass() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW - 1):
        scene.fail()
    scene.breaker.miss(scene.breaker.begin(), "outcome_unknown")
    scene.fail()
    assert scene.told == [(State.OPEN, "server_error")]
    scene.now += FIRST_OPEN_SECONDS
    assert scene.breaker.state is State.HALF_OPEN

    scene.breaker.miss(scene.breaker.begin(), "outcome_unknown")

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (State.OPEN, 2 * FIRST_OPEN_SECONDS)


def test_a_fault_opens_it_at_once() -> None:
    scene = Scene()

    scene.breaker.open(scene.breaker.begin(), "bad credentials")

    assert (scene.breaker.state, scene.breaker.reason) == (State.OPEN, "bad credentials")


def test_throttling_pauses_as_long_as_the_provider_asks_and_then_bounds_nothing() -> None:
    scene = Scene()

    scene.throttle(90.0)
    assert (scene.breaker.state, scene.breaker.room, scene.breaker.wait_seconds) == (State.PAUSED, 0, 90.0)
    scene.now += 90.0

    assert (scene.breaker.state, scene.breaker.room) == (State.CLOSED, None)


@pytest.mark.parametrize("asked", [None, 0.0, -5.0, float("nan"), 0.001])
def test_a_hundred_emails_throttled_at_once_without_a_time_pause_it_once_for_a_second(asked: float | None) -> None:
    scene = Scene()

    for _ in range(100):
        scene.throttle(asked)

    assert scene.told == [(State.PAUSED, "throttled")]
    assert scene.breaker.wait_seconds == pytest.approx(DEFAULT_PAUSE_SECONDS)


def test_throttling_that_goes_on_without_a_time_pauses_for_longer_until_an_answer_comes() -> None:
    scene = Scene()
    waits = []
    for _ in range(3):
        scene.throttle(None)
        waits.append(scene.breaker.wait_seconds)
        scene.now += scene.breaker.wait_seconds
    scene.breaker.succeed(scene.breaker.begin())
    scene.throttle(None)

    assert [*waits, scene.breaker.wait_seconds] == [1.0, 2.0, 4.0, 1.0]


def test_a_hundred_emails_that_hear_the_same_no_a_moment_apart_are_told_once_and_the_last_end_counts() -> None:
    scene = Scene()

    for _ in range(100):
        scene.throttle(10.0)
        scene.now += 0.001

    assert scene.told == [(State.PAUSED, "throttled")]
    assert scene.breaker.wait_seconds == pytest.approx(9.999)


def test_the_longest_pause_that_was_asked_for_counts() -> None:
    scene = Scene()

    scene.throttle(5.0)
    scene.throttle(60.0)
    scene.throttle(1.0)

    assert scene.breaker.wait_seconds == 60.0


@pytest.mark.parametrize("asked", [1e12, float("inf")])
def test_no_pause_is_for_ever(asked: float) -> None:
    scene = Scene()

    scene.throttle(asked)

    assert scene.breaker.wait_seconds == LONGEST_PAUSE_SECONDS


def test_a_provider_that_fails_while_it_is_paused_is_not_tried_before_the_pause_ends() -> None:
    scene = Scene()
    trials = [scene.breaker.begin() for _ in range(FAILURES_IN_A_ROW)]
    scene.throttle(300.0)

    for trial in trials:
        scene.breaker.fail(trial, "server_error")

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (State.OPEN, 300.0)


def test_a_provider_that_throttles_while_it_is_open_is_not_probed_before_the_pause_ends() -> None:
    scene = Scene()
    trials = [scene.breaker.begin() for _ in range(100)]
    scene.fail_often()

    for trial in trials:
        scene.breaker.pause(trial, 30.0, "throttled")

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (State.OPEN, 30.0)
    assert scene.breaker.reason == "connection_failed"
    assert len(scene.told) == 2
