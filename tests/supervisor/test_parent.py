"""Tests the parent with fake roles instead of workers, but with real forks and signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dispatcher.supervisor.parent import REPEATED_SECONDS
from tests.supervisor.conftest import ParentStarter, stop
from tests.supervisor.program import DEADLINE_SECONDS, eventually


def test_all_roles_start_and_a_drain_ends_the_relay_last_even_if_the_starter_blocked_signals(
    starter: ParentStarter, tmp_path: Path
) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "counter_w0-0.db").write_bytes(b"of an earlier run")
    blocking = (
        "import os, signal, sys;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD});"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    by = [sys.executable, "-c", blocking]
    parent = starter.start("a=serve", "b=serve:0.3", "again=exit:0", "patient=unfit:1", "relay=serve", by=by)
    eventually(lambda: len(starter.diary("serving")) == 3)
    parent.await_events("process.started", 3, role="again")
    waiting = parent.await_events("process.exited", role="patient")
    assert not list((tmp_path / "metrics").iterdir())

    stop(parent)

    assert waiting["retry_in_seconds"] > DEADLINE_SECONDS  # the stop did not wait for this restart
    stopped, asked = starter.diary("stopped"), starter.diary("stopping")
    assert {name for name, _ in asked[:2]} == {name for name, _ in stopped[:2]} == {"a", "b"}
    assert [name for name, _ in stopped[2:]] == [name for name, _ in asked[2:]] == ["relay"]


def test_a_process_that_does_not_drain_in_time_is_killed_and_the_exit_code_shows_it(starter: ParentStarter) -> None:
    parent = starter.start("a=deaf", "b=serve", "relay=serve", drain_seconds=0)
    eventually(lambda: len(starter.diary("serving")) == 3)

    parent.send(signal.SIGTERM)

    assert parent.await_exit() == 1
    assert [event["role"] for event in parent.events("process.killed")] == ["a"]
    # The relay stops last and has its own time limit, because it settles the leases of the killed process.
    assert [name for name, _ in starter.diary("stopped")] == ["b", "relay"]
    assert not parent.members()


def test_a_second_sigterm_kills_at_once(starter: ParentStarter) -> None:
    parent = starter.start("a=deaf", "relay=deaf", drain_seconds=600)
    eventually(lambda: len(starter.diary("serving")) == 2)
    began_at = time.monotonic()
    parent.send(signal.SIGTERM)
    parent.await_events("dispatcher.draining", signal="SIGTERM")

    def killed() -> bool:
        parent.send(signal.SIGTERM)
        return bool(parent.events("process.killed"))

    eventually(killed)
    # The parent treats signals that follow within REPEATED_SECONDS as one signal.
    assert time.monotonic() - began_at > REPEATED_SECONDS
    assert parent.await_exit() == 1
    # A process may be reported more than once, because a further signal may arrive before the killed process has
    # exited.
    assert {event["role"] for event in parent.events("process.killed")} == {"a", "relay"}
    assert not parent.members()


@pytest.mark.parametrize("closes", [False, True], ids=["Ctrl-C", "the terminal closes"])
def test_a_signal_from_the_terminal_causes_one_drain(starter: ParentStarter, closes: bool) -> None:
    ours, theirs = os.openpty()
    # The first terminal that a session leader opens becomes its controlling terminal.
    opening = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
    parent = starter.start("a=serve:0.2", "relay=serve", by=[sys.executable, "-c", opening, os.ttyname(theirs)])
    os.close(theirs)
    eventually(lambda: len(starter.diary("serving")) == 2)

    if closes:
        os.close(ours)
    else:
        os.write(ours, b"\x03")  # the terminal signals the children, too

    assert parent.await_exit() == 0
    assert [event["signal"] for event in parent.events("dispatcher.draining")] == ["SIGHUP" if closes else "SIGINT"]
    assert [name for name, _ in starter.diary("stopped")] == ["a", "relay"]
    assert "Traceback" not in parent.words
    with suppress(OSError):
        os.close(ours)


def test_children_drain_when_their_parent_dies(starter: ParentStarter) -> None:
    parent = starter.start("by-signal=signal", "by-lifeline=lifeline", "by-either=serve:0.3", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 4)

    parent.send(signal.SIGKILL)

    parent.await_exit()
    parent.await_all_ended()
    assert {name for name, _ in starter.diary("stopped")} == {"by-signal", "by-lifeline", "by-either", "relay"}


def test_children_that_are_just_being_forked_do_not_outlive_their_parent(starter: ParentStarter) -> None:
    for _ in range(3):
        parent = starter.start("eager-a=exit:0", "eager-b=exit:0", "b=serve", "relay=serve")
        parent.await_events("process.exited", 20)

        parent.send(signal.SIGKILL)

        parent.await_exit()
        parent.await_all_ended()


def test_an_unwritable_log_ends_no_process(starter: ParentStarter) -> None:
    parent = starter.start("a=exit:0", "b=serve", "relay=serve", stdout=Path("/dev/full"))

    eventually(lambda: len([name for name, _, _ in starter.lines() if name == "a"]) >= 5)

    eventually(lambda: len(starter.diary("serving")) == 2)
    assert not starter.diary("escaped")
    stop(parent)


def test_a_stop_works_whatever_the_parent_is_doing(starter: ParentStarter) -> None:
    for _ in range(20):
        parent = starter.start("eager-a=exit:0", "eager-b=exit:0", "eager-c=exit:0", "listens=signal", "relay=signal")
        parent.await_events("process.started")  # at a different moment each time, because this is polled

        parent.send(signal.SIGTERM)

        assert parent.await_exit() == 0


def test_a_signal_to_a_new_child_is_not_handled_as_the_parents(starter: ParentStarter) -> None:
    parent = starter.start("eager=signal", "relay=serve")
    relay = parent.pid_of("relay")
    eventually(lambda: any(pid == relay for _, pid in starter.diary("serving")))

    def many_ended_in_both_ways() -> bool:
        for pid in (pid for _ in range(1000) for pid in parent.children() if pid != relay):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert not parent.events("dispatcher.draining")
        ends = parent.events("process.exited", role="eager")
        # Some children must get the signal before they have installed handlers. Otherwise the test has missed the
        # critical moment.
        return len(ends) >= 100 and {event["exit_status"] for event in ends} >= {"exit 0", "signal SIGTERM"}

    eventually(many_ended_in_both_ways)

    assert parent.pid_of("relay") == relay
    ways = {event["exit_status"] for event in parent.events("process.exited", role="eager")}
    assert ways == {"exit 0", "signal SIGTERM"}
    stop(parent)
