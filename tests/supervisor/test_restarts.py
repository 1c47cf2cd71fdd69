"""Tests how long a role waits before a restart."""

from __future__ import annotations

from dispatcher.supervisor.supervised import LONGEST_WAIT_SECONDS, STEADY_SECONDS, Restarts


def waits(*lived_seconds: float) -> list[float]:
    restarts, found = Restarts(), []
    for seconds in lived_seconds:
        restarts = restarts.after(seconds)
        found.append(restarts.wait_seconds)
    return found


def test_the_first_restart_has_no_wait() -> None:
    assert waits(0.0) == [0.0]


def test_waits_double_while_the_process_ends_at_once() -> None:
    assert waits(0.1, 0.1, 0.1, 0.1, 0.1) == [0.0, 0.1, 0.2, 0.4, 0.8]


def test_waits_are_bounded() -> None:
    assert waits(*[0.1] * 5000)[-1] == LONGEST_WAIT_SECONDS


def test_a_healthy_run_resets_the_waits() -> None:
    assert waits(0.1, 0.1, 0.1, STEADY_SECONDS, 0.1) == [0.0, 0.1, 0.2, 0.0, 0.1]
