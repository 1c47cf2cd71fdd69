"""The parent detects processes that hang, and processes that never boot."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest

from tests.supervisor.parent_starter import ParentStarter
from tests.supervisor.program import eventually

HANG_SECONDS = 5.0
"""Ten times the heartbeat interval, so that a stall of a busy machine does not count as a hang."""


@pytest.mark.parametrize("role", ["a", "relay"])
def test_a_process_whose_loop_hangs_is_aborted_with_a_traceback_and_restarted(
    starter: ParentStarter, role: str
) -> None:
    # Only one role hangs, because concurrent aborts would mix their tracebacks.
    tasks = {"a": "serve", "relay": "serve", role: "hang"}
    parent = starter.start(
        f"a={tasks['a']}", "b=serve", "c=serve", f"relay={tasks['relay']}", hang_seconds=HANG_SECONDS
    )
    # A role that hangs from its start may have been restarted already. So compare names, not numbers.
    eventually(lambda: {name for name, _ in starter.diary("serving")} == {"a", "b", "c", "relay"})
    frozen = parent.pid_of("c")

    parent.send_to(frozen, signal.SIGSTOP)

    aborted = parent.await_events("process.exited", role=role)
    assert (aborted["reason"], aborted["exit_status"]) == ("hung", "signal SIGABRT")
    assert "in block" in parent.words
    # A process that cannot print its traceback is killed a moment later.
    killed = parent.await_events("process.exited", role="c")
    assert (killed["reason"], killed["exit_status"], killed["pid"]) == ("hung", "signal SIGKILL", frozen)
    hung = {event["pid"]: event["silent_seconds"] for event in parent.events("process.hung")}
    assert {aborted["pid"], killed["pid"]} <= set(hung)
    assert all(seconds >= HANG_SECONDS for seconds in hung.values())
    eventually(lambda: len(starter.diary("serving")) >= 6)
    # The parent does not restart a process that sends heartbeats.
    assert not parent.events("process.exited", role="b")


@pytest.mark.slow
def test_a_suspended_host_kills_no_process(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "b=serve", "relay=serve", hang_seconds=HANG_SECONDS)
    eventually(lambda: len(starter.diary("serving")) == 3)

    parent.freeze_all(seconds=1.5 * HANG_SECONDS)

    # After the suspension, the parent still detects a process that really hangs.
    stopped = parent.pid_of("b")
    parent.send_to(stopped, signal.SIGSTOP)
    parent.await_events("process.hung", pid=stopped)
    assert [event["role"] for event in parent.events("process.hung")] == ["b"]


def test_a_failed_boot_waits_longer_than_a_crash(starter: ParentStarter) -> None:
    parent = starter.start("a=unfit:3", "b=exit:3", "c=serve", "relay=serve")

    parent.await_events("process.exited", 3, role="a")
    parent.await_events("process.exited", role="b")

    ends = parent.events("process.exited", role="a")[:3]
    assert {(end["reason"], end["exit_status"]) for end in ends} == {("could_not_boot", "exit 3")}
    waits = [end["retry_in_seconds"] for end in ends]
    assert waits[0] > 0
    assert all(later > earlier for earlier, later in pairwise(waits))
    assert {event["reason"] for event in parent.events("process.exited", role="b")} == {"crashed"}
    # The parent keeps running, because the other processes are healthy.
    assert not parent.events("process.exited", role="c")
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_a_mistake_in_the_settings_is_printed_without_a_traceback(starter: ParentStarter) -> None:
    parent = starter.start("a=mistaken", "relay=serve")

    ended = parent.await_events("process.exited", role="a")

    assert (ended["reason"], ended["exit_status"]) == ("could_not_boot", "exit 78")
    assert ended["error"] == "TOY_SIZE must be a whole number.; TOY_COLOUR is not set."
    assert "a: TOY_SIZE must be a whole number.\na: TOY_COLOUR is not set.\n" in parent.words
    assert "Traceback" not in parent.words


@pytest.mark.parametrize(
    ("kind", "error", "is_our_mistake"),
    [
        ("unfit:3", "exit 3.", False),
        ("killed", "signal SIGKILL.", False),
        ("full", "No space left on device. The log has details.", False),
        (
            "refused",
            "PostgreSQL refuses the user, the password or the database in DISPATCHER_DATABASE_URL. The log has",
            False,
        ),
        ("away", "PostgreSQL is not available. The log has details.", False),
        ("broken", "LookupError. The log has details.", True),
    ],
)
def test_the_public_reason_for_a_failed_boot_contains_nothing_private(
    starter: ParentStarter, kind: str, error: str, is_our_mistake: bool
) -> None:
    parent = starter.start(f"a={kind}", "relay=serve")

    ended = parent.await_events("process.exited", role="a", reason="could_not_boot")

    assert ended["error"].startswith(error)
    assert "private" not in ended["error"]
    assert ("Traceback" in parent.words) is is_our_mistake
    # For all other kinds, the log has the private details.
    assert kind in ("unfit:3", "killed") or "private" in parent.words


def test_an_exit_without_a_fault_is_reported_as_stopped(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 2)

    parent.send_to(parent.pid_of("a"), signal.SIGTERM)

    assert parent.await_events("process.exited", role="a")["reason"] == "stopped"
    eventually(lambda: len(starter.diary("serving")) == 3)
