"""An event is logged a limited number of times per time window."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from dispatcher.telemetry.storms import LINES_PER_WINDOW, WINDOW_SECONDS, CountedLine, StormLimit


class Clock:
    """A clock that moves only when the test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def pass_on(limit: StormLimit, name: str) -> dict[str, Any] | None:
    """The event if the limit passes it; None if the limit drops it."""
    try:
        return dict(limit(None, "info", {"event": name}))
    except structlog.DropEvent:
        return None


def test_a_window_has_a_limited_number_of_lines_of_an_event() -> None:
    limit = StormLimit(Clock())

    passed = [pass_on(limit, "message.rejected") for _ in range(LINES_PER_WINDOW + 5)]

    assert passed.count(None) == 5
    assert pass_on(limit, "relay.leading") == {"event": "relay.leading"}


def test_the_next_window_begins_with_the_number_of_suppressed_lines() -> None:
    clock = Clock()
    limit = StormLimit(clock)
    for _ in range(LINES_PER_WINDOW + 5):
        pass_on(limit, "message.rejected")

    clock.now += WINDOW_SECONDS

    assert pass_on(limit, "message.rejected") == {"event": "message.rejected", "suppressed": 5}
    assert pass_on(limit, "message.rejected") == {"event": "message.rejected"}


@pytest.mark.parametrize("name", ["email.attempted", "email.recovered"])
def test_attempts_and_recoveries_of_emails_are_not_limited(name: str) -> None:
    limit = StormLimit(Clock())

    assert None not in [pass_on(limit, name) for _ in range(10 * LINES_PER_WINDOW)]


def test_a_counted_line_is_due_once_per_period_with_the_count_since_the_previous_line() -> None:
    clock = Clock()
    line = CountedLine(30, clock)

    assert [line.due() for _ in range(4)] == [1, 0, 0, 0]
    clock.now = 30
    assert line.due(2) == 5
    assert line.due() == 0


def test_a_counted_line_without_anything_to_count_is_never_due() -> None:
    assert CountedLine(30, Clock()).due(0) == 0
