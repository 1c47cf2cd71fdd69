"""Tests the parent with fake roles instead of workers, but with real forks and signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from dispatcher.supervisor.parent import REPEATED_SECONDS
from tests.supervisor.parent_starter import ParentStarter
from tests.supervisor.program import DEADLINE_SECONDS, eventually, is_alive, processes

CLOCK_SECONDS: Final = 0.02
"""The largest difference that a test allows between the log's clock, which may be set, and the monotonic clock that
times the waits."""


def test_all_roles_start_and_a_drain_ends_the_relay_last(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "b=serve:0.3", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 3)

    parent.send(signal.SIGTERM)

    assert parent.await_exit() == 0
    stopped, asked = starter.diary("stopped"), starter.diary("stopping")
    assert {name for name, _ in asked[:2]} == {"a", "b"}
    assert {name for name, _ in stopped[:2]} == {"a", "b"}
    assert [name for name, _ in stopped[2:]] == [name for name, _ in asked[2:]] == ["relay"]
    assert not parent.members()


@pytest.mark.parametrize(
    ("kind", "how"),
    [("exit:0", "exit 0"), ("exit:3", "exit 3"), ("raise", "exit 1"), ("abort", "signal SIGKILL")],
)
def test_an_ended_process_is_restarted_and_others_are_left_alone(starter: ParentStarter, kind: str, how: str) -> None:
    parent = starter.start(f"a={kind}", "b=serve", "relay=serve")

    parent.await_events("process.exited", 3, role="a", exit_status=how)

    assert len(parent.events("process.started", role="a")) >= 3
    eventually(lambda: len(starter.diary("serving")) == 2)
    assert len(parent.events("process.started", role="b")) == 1
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_the_relay_is_woken_when_another_process_has_ended(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "relay=ends", "monitor=serve")
    eventually(lambda: len(starter.diary("serving")) == 3)
    assert not starter.diary("woken")

    os.kill(parent.pid_of("a"), signal.SIGKILL)

    eventually(lambda: bool(starter.diary("woken")))
    assert {name for name, _ in starter.diary("woken")} == {"relay"}
    assert len(parent.events("process.started", role="monitor")) == 1  # the signal ends no process
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_an_end_by_a_signal_without_a_name_is_handled_like_any_other(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 2)

    os.kill(parent.pid_of("a"), signal.SIGRTMIN + 6)

    parent.await_events("process.exited", role="a", exit_status=f"signal {signal.SIGRTMIN + 6}")
    eventually(lambda: len(starter.diary("serving")) == 3)
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_a_failed_fork_is_retried_and_does_not_end_the_parent(starter: ParentStarter) -> None:
    parent = starter.start("a=serve", "relay=serve", failing_forks=4)

    eventually(lambda: len(starter.diary("serving")) == 2)

    ends = parent.events("process.exited", exit_status="not forked: Resource temporarily unavailable")
    assert len(ends) == 4
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_the_traceback_of_a_broken_role_is_on_stderr(starter: ParentStarter) -> None:
    parent = starter.start("a=raise", "relay=serve")

    parent.await_events("process.exited", role="a", exit_status="exit 1")

    assert "RuntimeError: a fake role failed" in parent.words


def test_a_role_that_ends_at_once_waits_longer_and_longer(starter: ParentStarter) -> None:
    parent = starter.start("a=exit:1", "relay=serve")

    parent.await_events("process.started", 5, role="a")

    announced = [event["retry_in_seconds"] for event in parent.events("process.exited", role="a")[:4]]
    # The test measures from one start to the next, because the log reports an exit only after the wait has begun.
    waited = [seconds_between(*both) for both in pairwise(parent.events("process.started", role="a")[:5])]
    assert announced == [0.0, 0.1, 0.2, 0.4]
    # A busy machine may make the wait longer.
    assert all(real > said - CLOCK_SECONDS for said, real in zip(announced, waited, strict=True)), waited


def test_a_wait_for_a_restart_does_not_delay_the_stop(starter: ParentStarter) -> None:
    parent = starter.start("patient=unfit:1", "relay=serve")
    waiting = parent.await_events("process.exited", role="patient")

    parent.send(signal.SIGTERM)

    assert parent.await_exit() == 0
    assert waiting["retry_in_seconds"] > DEADLINE_SECONDS


def test_a_process_that_does_not_drain_in_time_is_killed_and_the_exit_code_shows_it(starter: ParentStarter) -> None:
    parent = starter.start("a=deaf", "b=serve", "relay=serve", drain_seconds=0)
    eventually(lambda: len(starter.diary("serving")) == 3)

    parent.send(signal.SIGTERM)

    assert parent.await_exit() == 1
    killed = parent.events("process.killed")
    assert [event["role"] for event in killed] == ["a"]
    # The relay stops last and has its own time limit, because it settles the leases of the killed process.
    assert [name for name, _ in starter.diary("stopped")] == ["b", "relay"]
    assert not parent.members()


def test_signals_blocked_by_the_starting_process_are_handled(starter: ParentStarter) -> None:
    blocking = (
        "import os, signal, sys;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD});"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    parent = starter.start("a=exit:0", "b=serve", "relay=serve", by=[sys.executable, "-c", blocking])

    parent.await_events("process.started", 3, role="a")

    eventually(lambda: len(starter.diary("serving")) == 2)
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


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


def test_ctrl_c_in_a_terminal_causes_one_drain(starter: ParentStarter) -> None:
    parent = starter.start("a=serve:0.2", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 2)

    parent.send_all(signal.SIGINT)  # a terminal signals the children, too

    assert parent.await_exit() == 0
    assert parent.events("dispatcher.draining")[0]["signal"] == "SIGINT"
    assert [name for name, _ in starter.diary("stopped")] == ["a", "relay"]
    assert "Traceback" not in parent.words


def test_a_closing_terminal_causes_one_drain(starter: ParentStarter) -> None:
    ours, theirs = os.openpty()
    # The first terminal that a session leader opens becomes its controlling terminal.
    opening = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
    parent = starter.start("a=serve:0.2", "relay=serve", by=[sys.executable, "-c", opening, os.ttyname(theirs)])
    os.close(theirs)
    eventually(lambda: len(starter.diary("serving")) == 2)

    os.close(ours)

    assert parent.await_exit() == 0
    assert parent.events("dispatcher.draining")[0]["signal"] == "SIGHUP"
    assert [name for name, _ in starter.diary("stopped")] == ["a", "relay"]


@pytest.mark.parametrize("kind", ["signal", "lifeline", "serve:0.3"])
def test_children_drain_when_their_parent_dies(starter: ParentStarter, kind: str) -> None:
    parent = starter.start(f"a={kind}", f"b={kind}", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 3)

    parent.send(signal.SIGKILL)

    parent.await_exit()
    parent.await_all_ended()
    assert sorted(name for name, _ in starter.diary("stopped")) == ["a", "b", "relay"]


def test_no_process_outlives_a_parent_killed_during_a_reload(starter: ParentStarter) -> None:
    parent = starter.start("worker*2=serve:0.1", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 3)
    starter.change_roles("worker*2=signal", "relay=serve")
    parent.send(signal.SIGHUP)
    parent.await_events("process.started", 4)

    parent.send(signal.SIGKILL)

    parent.await_exit()
    parent.await_all_ended()


def test_children_that_are_just_being_forked_do_not_outlive_their_parent(starter: ParentStarter) -> None:
    for _ in range(5):
        parent = starter.start("eager-a=exit:0", "eager-b=exit:0", "b=serve", "relay=serve")
        parent.await_events("process.exited", 20)

        parent.send(signal.SIGKILL)

        parent.await_exit()
        parent.await_all_ended()


def test_a_run_directory_writable_by_others_is_refused(starter: ParentStarter, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run").chmod(0o770)

    parent = starter.start("a=serve", "relay=serve")

    assert parent.await_exit() != 0
    assert "DISPATCHER_RUN_DIR" in parent.words
    assert not starter.diary("serving")


def test_metrics_of_an_earlier_run_are_deleted_even_if_metrics_are_off(starter: ParentStarter, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "counter_w0-0.db").write_bytes(b"of an earlier run")

    starter.start("a=serve", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 2)

    assert not list((tmp_path / "metrics").iterdir())


def test_a_second_parent_in_the_same_run_directory_is_refused_with_a_remedy(
    starter: ParentStarter, tmp_path: Path
) -> None:
    first = starter.start("a=serve", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 2)

    second = starter.start("a=serve", "relay=serve")

    assert second.await_exit() != 0
    assert f"Another `dispatcher run` uses the run directory {tmp_path / 'run'}." in second.words
    assert len(starter.diary("serving")) == 2
    first.send(signal.SIGTERM)
    assert first.await_exit() == 0


def test_a_new_parent_may_start_while_an_orphan_still_drains(starter: ParentStarter) -> None:
    first = starter.start("a=serve:30", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 2)
    orphan = first.pid_of("a")
    first.send(signal.SIGKILL)
    first.await_exit()
    eventually(lambda: ("a", orphan) in starter.diary("stopping"))

    second = starter.start("a=serve", "relay=serve")

    eventually(lambda: len(starter.diary("serving")) == 4)
    assert is_alive(orphan)
    second.send(signal.SIGTERM)
    assert second.await_exit() == 0


def test_a_parent_may_start_after_another_was_killed(starter: ParentStarter) -> None:
    first = starter.start("a=serve", "relay=serve")
    eventually(lambda: len(starter.diary("serving")) == 2)
    first.send_all(signal.SIGKILL)
    first.await_exit()

    second = starter.start("a=serve", "relay=serve")

    eventually(lambda: len(starter.diary("serving")) == 4)
    second.send(signal.SIGTERM)
    assert second.await_exit() == 0


def test_an_unwritable_log_ends_no_process(starter: ParentStarter) -> None:
    parent = starter.start("a=chat", "b=serve", "relay=serve", stdout=Path("/dev/full"))

    eventually(lambda: len(starter.diary("chatted")) >= 5)

    eventually(lambda: len(starter.diary("serving")) == 2)
    assert not starter.diary("escaped")
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0
    assert not parent.members()


def test_a_hundred_restarts_leak_neither_descriptors_nor_zombies(starter: ParentStarter) -> None:
    parent = starter.start("eager=exit:0", "relay=serve")
    parent.await_events("process.exited", 10, role="eager")
    before = descriptors(parent.pid)

    parent.await_events("process.exited", 110, role="eager")

    assert descriptors(parent.pid) <= before  # `before` may include a process that was starting
    assert len(set(starter.words("descriptors="))) == 1
    # The list contains at most the child that has just exited, which the parent will soon reap.
    eventually(lambda: not [entry for entry in processes() if entry.parent == parent.pid and entry.state == "Z"])
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def seconds_between(earlier: dict[str, str], later: dict[str, str]) -> float:
    return (datetime.fromisoformat(later["timestamp"]) - datetime.fromisoformat(earlier["timestamp"])).total_seconds()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
