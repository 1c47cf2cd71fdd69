"""The parent restarts processes that end, that cannot boot, or that hang, and waits longer after each failure."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from dispatcher.supervisor.supervised import LONGEST_WAIT_SECONDS, STEADY_SECONDS, Restarts
from tests.supervisor.conftest import ParentStarter, stop
from tests.supervisor.program import eventually, processes

CLOCK_SECONDS: Final = 0.02
"""The largest difference that a test allows between the log's clock, which may be set, and the monotonic clock that
times the waits."""
HANG_SECONDS: Final = 5.0
"""Ten times the heartbeat interval, so that a stall of a busy machine does not count as a hang."""


@pytest.mark.parametrize(
    ("lived_seconds", "waits"),
    [
        pytest.param([0.0], [0.0], id="the first restart has no wait"),
        pytest.param([0.1] * 5, [0.0, 0.1, 0.2, 0.4, 0.8], id="waits double while the process ends at once"),
        pytest.param([0.1] * 3 + [STEADY_SECONDS, 0.1], [0.0, 0.1, 0.2, 0.0, 0.1], id="a steady run resets the waits"),
        pytest.param([0.1] * 5000, [LONGEST_WAIT_SECONDS], id="waits are bounded"),
    ],
)
def test_the_wait_before_a_restart(lived_seconds: list[float], waits: list[float]) -> None:
    restarts, found = Restarts(), []
    for seconds in lived_seconds:
        restarts = restarts.after(seconds)
        found.append(restarts.wait_seconds)

    assert found[-len(waits) :] == waits


def test_an_ended_process_is_restarted_and_others_are_left_alone(starter: ParentStarter) -> None:
    kinds = {"exit:0": "exit 0", "exit:3": "exit 3", "raise": "exit 1", "abort": "signal SIGKILL"}
    parent = starter.start(*(f"{kind}={kind}" for kind in kinds), "b=serve", "c=serve", "relay=ends", "monitor=serve")
    for kind, how in kinds.items():
        parent.await_events("process.exited", 3, role=kind, exit_status=how)
    parent.await_events("process.started", 5, role="exit:3")
    eventually(lambda: len(starter.diary("serving")) == 4)
    nameless = signal.SIGRTMIN + 6

    os.kill(parent.pid_of("b"), nameless)
    parent.await_events("process.exited", role="b", exit_status=f"signal {nameless}")
    eventually(lambda: len(starter.diary("serving")) == 5)
    parent.send_to(parent.pid_of("b"), signal.SIGTERM)
    parent.await_events("process.exited", role="b", reason="stopped")
    eventually(lambda: len(starter.diary("serving")) == 6)

    announced = [event["retry_in_seconds"] for event in parent.events("process.exited", role="exit:3")[:4]]
    # The test measures from one start to the next, because the log reports an exit only after the wait has begun.
    starts = [datetime.fromisoformat(event["timestamp"]) for event in parent.events("process.started", role="exit:3")]
    waited = [(later - earlier).total_seconds() for earlier, later in pairwise(starts[:5])]
    assert announced == [0.0, 0.1, 0.2, 0.4]
    # A busy machine may make the wait longer.
    assert all(real > said - CLOCK_SECONDS for said, real in zip(announced, waited, strict=True)), waited
    assert "RuntimeError: a fake role failed" in parent.words
    eventually(lambda: starter.diary("woken"), "the relay, which is woken when another process has ended")
    assert {len(parent.events("process.started", role=role)) for role in ("c", "relay", "monitor")} == {1}
    stop(parent)


def test_a_failed_boot_is_reported_without_private_values_and_waits_longer_than_a_crash(starter: ParentStarter) -> None:
    refusal = "PostgreSQL refuses the user, the password or the database in DISPATCHER_DATABASE_URL. The log has"
    errors = {
        "unfit:3": "exit 3.",
        "killed": "signal SIGKILL.",
        "full": "No space left on device. The log has details.",
        "refused": refusal,
        "away": "PostgreSQL is not available. The log has details.",
        "broken": "LookupError. The log has details.",
        "mistaken": "TOY_SIZE must be a whole number.; TOY_COLOUR is not set.",
    }
    parent = starter.start(*(f"{kind}={kind}" for kind in errors), "crash=exit:3", "serves=serve", "relay=serve")

    for kind, error in errors.items():
        ended = parent.await_events("process.exited", role=kind, reason="could_not_boot")
        assert ended["error"].startswith(error)
        assert "private" not in ended["error"]
    parent.await_events("process.exited", 3, role="unfit:3")

    ends = parent.events("process.exited", role="unfit:3")[:3]
    waits = [end["retry_in_seconds"] for end in ends]
    assert waits[0] > 0
    assert all(later > earlier for earlier, later in pairwise(waits))
    assert parent.events("process.exited", role="mistaken")[0]["exit_status"] == "exit 78"
    assert {event["reason"] for event in parent.events("process.exited", role="crash")} == {"crashed"}
    # The parent keeps running, because the other processes are healthy.
    assert not parent.events("process.exited", role="serves")
    stop(parent)
    # The log has the private values, and a traceback only of our own mistakes.
    for words in ("private/file", "user private", "as private", "LookupError: private"):
        assert words in parent.words
    for mistake in ("TOY_SIZE must be a whole number.", "TOY_COLOUR is not set."):
        assert f"mistaken: {mistake}\n" in parent.words
    assert parent.words.count("Traceback") == parent.words.count("LookupError: private")


def test_a_failed_fork_is_retried_and_does_not_end_the_parent(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "relay=serve", failing_forks=4)

    eventually(lambda: len(starter.diary("serving")) == 2)

    assert len(parent.events("process.exited", exit_status="not forked: Resource temporarily unavailable")) == 4
    stop(parent)


def test_restarts_leak_neither_descriptors_nor_zombies(starter: ParentStarter) -> None:
    parent = starter.start("eager=exit:0", "relay=serve")
    parent.await_events("process.exited", 10, role="eager")
    before = descriptors(parent.pid)

    parent.await_events("process.exited", 50, role="eager")

    eventually(lambda: descriptors(parent.pid) <= before)  # at times, a process that is starting has one more
    assert len({word for _, _, word in starter.lines() if word.startswith("descriptors=")}) == 1
    # The list contains at most the child that has just exited, which the parent will soon reap.
    eventually(lambda: not [entry for entry in processes() if entry.parent == parent.pid and entry.state == "Z"])
    stop(parent)


def test_a_process_whose_loop_hangs_is_aborted_with_a_traceback_and_restarted(starter: ParentStarter) -> None:
    parent = starter.start("b=serve", "c=serve", "relay=hang", hang_seconds=HANG_SECONDS)
    # The relay may have been restarted already. So compare names, not numbers.
    eventually(lambda: {name for name, _ in starter.diary("serving")} == {"b", "c", "relay"})
    frozen = parent.pid_of("c")

    parent.send_to(frozen, signal.SIGSTOP)

    aborted = parent.await_events("process.exited", role="relay")
    assert (aborted["reason"], aborted["exit_status"]) == ("hung", "signal SIGABRT")
    assert "in block" in parent.words
    # A process that cannot print its traceback is killed a moment later.
    killed = parent.await_events("process.exited", role="c")
    assert (killed["reason"], killed["exit_status"], killed["pid"]) == ("hung", "signal SIGKILL", frozen)
    hung = {event["pid"]: event["silent_seconds"] for event in parent.events("process.hung")}
    assert {aborted["pid"], killed["pid"]} <= set(hung)
    assert all(seconds >= HANG_SECONDS for seconds in hung.values())
    eventually(lambda: len(starter.diary("serving")) >= 5)
    # The parent does not restart a process that sends heartbeats.
    assert not parent.events("process.exited", role="b")


@pytest.mark.slow  # the suspension lasts longer than a hang
def test_a_suspended_host_kills_no_process(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "b=serve", "relay=serve", hang_seconds=HANG_SECONDS)
    eventually(lambda: len(starter.diary("serving")) == 3)

    parent.freeze_all(seconds=1.5 * HANG_SECONDS)

    # After the suspension, the parent still detects a process that really hangs.
    stopped = parent.pid_of("b")
    parent.send_to(stopped, signal.SIGSTOP)
    parent.await_events("process.hung", pid=stopped)
    assert [event["role"] for event in parent.events("process.hung")] == ["b"]


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
