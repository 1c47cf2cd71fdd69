"""The circuit breaker opens, pauses and closes, by a clock that the test moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dispatcher.routing.breaker import (
    DEFAULT_PAUSE_SECONDS,
    FAILURES_IN_A_ROW,
    FIRST_OPEN_SECONDS,
    LONGEST_OPEN_SECONDS,
    LONGEST_PAUSE_SECONDS,
    BreakerState,
    CircuitBreaker,
)


@dataclass
class Scene:
    """A circuit breaker, its clock, and the state changes that it reported."""

    now: float = 1000.0
    window: int = 1
    told: list[tuple[BreakerState, str | None]] = field(default_factory=list)
    breaker: CircuitBreaker = field(init=False)

    def __post_init__(self) -> None:
        self.breaker = CircuitBreaker(
            lambda: self.now,
            lambda state, reason, _: self.told.append((state, reason)),
            window=self.window,
            jitter=lambda: 1.0,
        )

    def fail_often(self) -> None:
        """Fails often enough to open the breaker."""
        for _ in range(FAILURES_IN_A_ROW):
            self.fail("connection_failed")

    def fail(self, reason: str = "server_error") -> None:
        self.breaker.fail(self.breaker.begin(), reason)

    def throttle(self, seconds: float | None) -> None:
        self.breaker.pause(self.breaker.begin(), seconds, "throttled")

    def half_open(self) -> None:
        self.fail_often()
        self.now += FIRST_OPEN_SECONDS
        assert self.breaker.state is BreakerState.HALF_OPEN


@pytest.mark.parametrize("seconds", [2.005, 2.015])
def test_wait_seconds_is_zero_only_after_the_change_was_reported(seconds: float) -> None:
    """A caller that gets neither a report nor a wait time would wait for ever. This is tested while the clock moves
    between any two calls."""
    clock = itertools.count(1000.0, 0.01)
    told: list[BreakerState] = []
    breaker = CircuitBreaker(lambda: next(clock), lambda state, _reason, _seconds: told.append(state))
    breaker.pause(breaker.begin(), seconds, "throttled")

    while breaker.wait_seconds:
        assert told == [BreakerState.PAUSED]

    assert told == [BreakerState.PAUSED, BreakerState.CLOSED]


def test_a_closed_breaker_has_no_limit() -> None:
    scene = Scene()

    assert (scene.breaker.state, scene.breaker.room, scene.breaker.wait_seconds) == (BreakerState.CLOSED, None, 0.0)


def test_failures_in_a_row_open_the_breaker_and_an_answer_resets_the_count() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW - 1):
        scene.fail()
    scene.breaker.succeed(scene.breaker.begin())
    scene.fail()
    assert scene.breaker.state is BreakerState.CLOSED

    scene.fail_often()

    assert (scene.breaker.state, scene.breaker.room) == (BreakerState.OPEN, 0)
    assert scene.breaker.reason == "connection_failed"


def test_after_its_time_an_open_breaker_allows_one_probe_whose_success_closes_it() -> None:
    scene = Scene()
    scene.half_open()

    assert scene.breaker.room == 1
    probe = scene.breaker.begin()
    assert scene.breaker.room == 0
    scene.breaker.succeed(probe)

    assert scene.breaker.state is BreakerState.CLOSED
    assert scene.told[-1] == (BreakerState.CLOSED, None)


def test_a_failed_probe_opens_the_breaker_for_longer_up_to_a_limit() -> None:
    scene = Scene()
    scene.fail_often()
    waits = []
    for _ in range(10):
        waits.append(scene.breaker.wait_seconds)
        scene.now += scene.breaker.wait_seconds
        assert scene.breaker.state is BreakerState.HALF_OPEN
        scene.fail()

    assert waits[:3] == [FIRST_OPEN_SECONDS, 2 * FIRST_OPEN_SECONDS, 4 * FIRST_OPEN_SECONDS]
    assert waits[-1] == LONGEST_OPEN_SECONDS


def test_a_probe_that_ended_without_an_answer_allows_another() -> None:
    scene = Scene()
    scene.half_open()
    probe = scene.breaker.begin()

    scene.breaker.abandon(probe)

    assert scene.breaker.room == 1


def test_a_trial_from_before_the_breaker_opened_does_not_decide_a_probe() -> None:
    scene = Scene()
    slow, silent, faulty, stopped = (scene.breaker.begin() for _ in range(4))
    scene.half_open()
    probe = scene.breaker.begin()

    scene.breaker.fail(slow, "timeout_before_send")
    scene.breaker.time_out(silent, "outcome_unknown")
    scene.breaker.open(faulty, "bad credentials")
    scene.breaker.abandon(stopped)

    assert (scene.breaker.state, scene.breaker.room) == (BreakerState.HALF_OPEN, 0)
    scene.breaker.succeed(probe)
    assert scene.breaker.state is BreakerState.CLOSED


def test_the_last_trial_before_the_breaker_opened_does_not_decide_a_probe() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW - 1):
        scene.fail()
    opening, last = scene.breaker.begin(), scene.breaker.begin()
    scene.breaker.fail(opening, "server_error")
    scene.now += FIRST_OPEN_SECONDS

    scene.breaker.fail(last, "server_error")

    assert (scene.breaker.state, scene.breaker.room) == (BreakerState.HALF_OPEN, 1)


def test_while_half_open_only_the_probe_may_proceed() -> None:
    scene = Scene()
    slow = scene.breaker.begin()
    assert scene.breaker.may_proceed(slow)
    scene.half_open()

    probe = scene.breaker.begin()

    assert (scene.breaker.may_proceed(probe), scene.breaker.may_proceed(slow)) == (True, False)


def test_a_trial_from_before_the_breaker_opened_does_not_open_it_again() -> None:
    scene = Scene()
    slow = [scene.breaker.begin() for _ in range(100)]
    scene.half_open()
    scene.breaker.succeed(scene.breaker.begin())

    for trial in slow:
        scene.breaker.fail(trial, "timeout_before_send")

    assert scene.breaker.state is BreakerState.CLOSED


def test_an_answer_to_an_old_trial_closes_a_half_open_breaker() -> None:
    scene = Scene()
    slow = scene.breaker.begin()
    scene.half_open()

    scene.breaker.succeed(slow)

    assert scene.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(("window", "silences"), [(1, FAILURES_IN_A_ROW), (256, 256)])
def test_a_whole_window_without_answers_opens_the_breaker(window: int, silences: int) -> None:
    scene = Scene(window=window)
    for _ in range(silences - 1):
        scene.breaker.time_out(scene.breaker.begin(), "outcome_unknown")
    assert scene.breaker.state is BreakerState.CLOSED

    scene.breaker.time_out(scene.breaker.begin(), "outcome_unknown")

    assert (scene.breaker.state, scene.breaker.reason) == (BreakerState.OPEN, "outcome_unknown")


def test_a_missing_answer_neither_resets_failures_nor_passes_a_probe() -> None:
    scene = Scene()
    for _ in range(FAILURES_IN_A_ROW - 1):
        scene.fail()
    scene.breaker.time_out(scene.breaker.begin(), "outcome_unknown")
    scene.fail()
    assert scene.told == [(BreakerState.OPEN, "server_error")]
    scene.now += FIRST_OPEN_SECONDS
    assert scene.breaker.state is BreakerState.HALF_OPEN

    scene.breaker.time_out(scene.breaker.begin(), "outcome_unknown")

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (BreakerState.OPEN, 2 * FIRST_OPEN_SECONDS)


def test_a_fault_opens_the_breaker_at_once() -> None:
    scene = Scene()

    scene.breaker.open(scene.breaker.begin(), "bad credentials")

    assert (scene.breaker.state, scene.breaker.reason) == (BreakerState.OPEN, "bad credentials")


def test_throttling_pauses_for_the_requested_time_and_then_has_no_limit() -> None:
    scene = Scene()

    scene.throttle(90.0)
    assert (scene.breaker.state, scene.breaker.room, scene.breaker.wait_seconds) == (BreakerState.PAUSED, 0, 90.0)
    scene.now += 90.0

    assert (scene.breaker.state, scene.breaker.room) == (BreakerState.CLOSED, None)


@pytest.mark.parametrize("asked", [None, 0.0, -5.0, float("nan"), 0.001])
def test_a_hundred_emails_throttled_at_once_without_a_time_pause_once_for_a_second(asked: float | None) -> None:
    scene = Scene()

    for _ in range(100):
        scene.throttle(asked)

    assert scene.told == [(BreakerState.PAUSED, "throttled")]
    assert scene.breaker.wait_seconds == pytest.approx(DEFAULT_PAUSE_SECONDS)


def test_continued_throttling_without_a_time_pauses_for_longer_until_an_answer() -> None:
    scene = Scene()
    waits = []
    for _ in range(3):
        scene.throttle(None)
        waits.append(scene.breaker.wait_seconds)
        scene.now += scene.breaker.wait_seconds
    scene.breaker.succeed(scene.breaker.begin())
    scene.throttle(None)

    assert [*waits, scene.breaker.wait_seconds] == [1.0, 2.0, 4.0, 1.0]


def test_a_hundred_equal_refusals_moments_apart_are_reported_once_and_the_latest_end_counts() -> None:
    scene = Scene()

    for _ in range(100):
        scene.throttle(10.0)
        scene.now += 0.001

    assert scene.told == [(BreakerState.PAUSED, "throttled")]
    assert scene.breaker.wait_seconds == pytest.approx(9.999)


def test_the_longest_requested_pause_counts() -> None:
    scene = Scene()

    scene.throttle(5.0)
    scene.throttle(60.0)
    scene.throttle(1.0)

    assert scene.breaker.wait_seconds == 60.0


@pytest.mark.parametrize("asked", [1e12, float("inf")])
def test_pauses_are_limited(asked: float) -> None:
    scene = Scene()

    scene.throttle(asked)

    assert scene.breaker.wait_seconds == LONGEST_PAUSE_SECONDS


def test_a_provider_that_fails_while_it_is_paused_is_not_tried_before_the_pause_ends() -> None:
    scene = Scene()
    trials = [scene.breaker.begin() for _ in range(FAILURES_IN_A_ROW)]
    scene.throttle(300.0)

    for trial in trials:
        scene.breaker.fail(trial, "server_error")

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (BreakerState.OPEN, 300.0)


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ((), BreakerState.CLOSED),
        ((lambda scene: scene.throttle(600.0),), BreakerState.CLOSED),
        ((Scene.fail_often,), BreakerState.HALF_OPEN),
        ((Scene.fail_often, lambda scene: scene.throttle(600.0)), BreakerState.HALF_OPEN),
        ((Scene.half_open,), BreakerState.HALF_OPEN),
    ],
    ids=["closed", "paused", "open", "open and throttled", "half open"],
)
def test_an_operators_resume_ends_every_wait_at_once(
    steps: tuple[Callable[[Scene], None], ...], state: BreakerState
) -> None:
    scene = Scene()
    for step in steps:
        step(scene)
    before, scene.told = scene.breaker.state, []

    scene.breaker.resume()

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (state, 0)
    assert [told for told, _ in scene.told] == ([] if state is before else [state])


def test_after_an_operators_resume_the_next_wait_is_short_again() -> None:
    scene = Scene()
    for _ in range(5):
        scene.fail_often()
        scene.now += scene.breaker.wait_seconds
    scene.fail()
    assert scene.breaker.wait_seconds > 10 * FIRST_OPEN_SECONDS

    scene.breaker.resume()
    scene.fail()

    assert scene.breaker.wait_seconds == FIRST_OPEN_SECONDS


def test_a_provider_that_throttles_while_it_is_open_is_not_probed_before_the_pause_ends() -> None:
    scene = Scene()
    trials = [scene.breaker.begin() for _ in range(100)]
    scene.fail_often()

    for trial in trials:
        scene.breaker.pause(trial, 30.0, "throttled")

    assert (scene.breaker.state, scene.breaker.wait_seconds) == (BreakerState.OPEN, 30.0)
    assert scene.breaker.reason == "connection_failed"
    assert len(scene.told) == 2
