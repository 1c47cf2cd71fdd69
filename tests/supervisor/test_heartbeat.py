"""Processes that hang, and those that never come up."""

from __future__ import annotations

import signal
from itertools import pairwise

import pytest

from tests.supervisor.nursery import Nursery
from tests.supervisor.program import eventually

HANG_SECONDS = 5.0
"""Ten times as long as a heart rests between two beats: a busy machine must not be taken for a hang."""


@pytest.mark.parametrize("role", ["a", "relay"])
def test_a_process_whose_loop_stands_still_is_aborted_with_a_traceback_and_replaced(
    nursery: Nursery, role: str
) -> None:
    # One at a time: two that are aborted at once write their tracebacks into each other's.
    tasks = {"a": "serve", "relay": "serve", role: "hang"}
    parent = nursery.start(
        f"a={tasks['a']}", "b=serve", "c=serve", f"relay={tasks['relay']}", hang_seconds=HANG_SECONDS
    )
    # One of them may be served again by now, because it hangs from its first moment on.
    eventually(lambda: {name for name, _ in nursery.diary("serving")} == {"a", "b", "c", "relay"})
    frozen = parent.pid_of("c")

    parent.send_to(frozen, signal.SIGSTOP)

    aborted = parent.await_events("process.exited", role=role)
    assert (aborted["reason"], aborted["exit_status"]) == ("hung", "signal SIGABRT")
    assert "in stand_still" in parent.words
    # One that cannot even say where it stands is killed a moment later.
    killed = parent.await_events("process.exited", role="c")
    assert (killed["reason"], killed["exit_status"], killed["pid"]) == ("hung", "signal SIGKILL", frozen)
    hung = {event["pid"]: event["silent_seconds"] for event in parent.events("process.hung")}
    assert {aborted["pid"], killed["pid"]} <= set(hung)
    assert all(seconds >= HANG_SECONDS for seconds in hung.values())
    eventually(lambda: len(nursery.diary("serving")) >= 6)
    # Who beats is let alone.
    assert not parent.events("process.exited", role="b")


@pytest.mark.slow
def test_a_host_that_stood_still_costs_nobody_his_life(nursery: Nursery) -> None:
    parent = nursery.start("a=serve", "b=serve", "relay=serve", hang_seconds=HANG_SECONDS)
    eventually(lambda: len(nursery.diary("serving")) == 3)

    parent.freeze_all(seconds=1.5 * HANG_SECONDS)

    # One whose heart has really stopped is found all the same, after all others have been looked at.
    stopped = parent.pid_of("b")
    parent.send_to(stopped, signal.SIGSTOP)
    parent.await_events("process.hung", pid=stopped)
    assert [event["role"] for event in parent.events("process.hung")] == ["b"]


def test_who_ends_before_he_is_up_could_not_boot_and_waits_longer_than_after_a_crash(nursery: Nursery) -> None:
    parent = nursery.start("a=unfit:3", "b=exit:3", "c=serve", "relay=serve")

    parent.await_events("process.exited", 3, role="a")
    parent.await_events("process.exited", role="b")

    ends = parent.events("process.exited", role="a")[:3]
    assert {(end["reason"], end["exit_status"]) for end in ends} == {("could_not_boot", "exit 3")}
    waits = [end["retry_in_seconds"] for end in ends]
    assert waits[0] > 0
    assert all(later > earlier for earlier, later in pairwise(waits))
    assert {event["reason"] for event in parent.events("process.exited", role="b")} == {"crashed"}
    # The parent lives for the sake of those that are well.
    assert not parent.events("process.exited", role="c")
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_a_mistake_in_the_settings_is_told_in_words_and_not_as_a_traceback(nursery: Nursery) -> None:
    parent = nursery.start("a=mistaken", "relay=serve")

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
def test_the_public_reason_for_a_failed_boot_has_no_private_words(
    nursery: Nursery, kind: str, error: str, is_our_mistake: bool
) -> None:
    parent = nursery.start(f"a={kind}", "relay=serve")

    ended = parent.await_events("process.exited", role="a", reason="could_not_boot")

    assert ended["error"].startswith(error)
    assert "private" not in ended["error"]
    assert ("Traceback" in parent.words) is is_our_mistake
    assert kind in ("unfit:3", "killed") or "private" in parent.words  # the log has it


def test_who_ends_without_a_fault_was_told_to_by_somebody_else(nursery: Nursery) -> None:
    parent = nursery.start("a=serve", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 2)

    parent.send_to(parent.pid_of("a"), signal.SIGTERM)

    assert parent.await_events("process.exited", role="a")["reason"] == "stopped"
    eventually(lambda: len(nursery.diary("serving")) == 3)
