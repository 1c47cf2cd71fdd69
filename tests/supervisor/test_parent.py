"""The parent alone, with toys for workers: real forks, real signals."""

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
from tests.supervisor.nursery import Nursery
from tests.supervisor.program import DEADLINE_SECONDS, eventually, is_alive, processes

CLOCK_SECONDS: Final = 0.02
"""What the log's clock, which may be set, and the steady one that the parent waits by may differ in a test."""


def test_everything_starts_and_a_drain_ends_the_relay_last(nursery: Nursery) -> None:
    parent = nursery.start("a=serve", "b=serve:0.3", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 3)

    parent.send(signal.SIGTERM)

    assert parent.await_exit() == 0
    stopped, asked = nursery.diary("stopped"), nursery.diary("stopping")
    assert {name for name, _ in asked[:2]} == {"a", "b"}
    assert {name for name, _ in stopped[:2]} == {"a", "b"}
    assert [name for name, _ in stopped[2:]] == [name for name, _ in asked[2:]] == ["relay"]
    assert not parent.members()


@pytest.mark.parametrize(
    ("kind", "how"),
    [("exit:0", "exit 0"), ("exit:3", "exit 3"), ("raise", "exit 1"), ("abort", "signal SIGKILL")],
)
def test_whatever_ends_is_started_again_and_its_neighbour_is_left_alone(nursery: Nursery, kind: str, how: str) -> None:
    parent = nursery.start(f"a={kind}", "b=serve", "relay=serve")

    parent.await_events("process.exited", 3, role="a", exit_status=how)

    assert len(parent.events("process.started", role="a")) >= 3
    eventually(lambda: len(nursery.diary("serving")) == 2)
    assert len(parent.events("process.started", role="b")) == 1
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_an_end_by_a_signal_that_has_no_name_is_an_end_like_any_other(nursery: Nursery) -> None:
    parent = nursery.start("a=serve", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 2)

    os.kill(parent.pid_of("a"), signal.SIGRTMIN + 6)

    parent.await_events("process.exited", role="a", exit_status=f"signal {signal.SIGRTMIN + 6}")
    eventually(lambda: len(nursery.diary("serving")) == 3)
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_a_host_that_is_short_of_processes_costs_a_wait_and_not_the_parent(nursery: Nursery) -> None:
    parent = nursery.start("a=serve", "relay=serve", failing_forks=4)

    eventually(lambda: len(nursery.diary("serving")) == 2)

    ends = parent.events("process.exited", exit_status="not forked: Resource temporarily unavailable")
    assert len(ends) == 4
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_the_traceback_of_a_broken_role_is_on_stderr(nursery: Nursery) -> None:
    parent = nursery.start("a=raise", "relay=serve")

    parent.await_events("process.exited", role="a", exit_status="exit 1")

    assert "RuntimeError: a toy broke" in parent.words


def test_a_role_that_ends_at_once_waits_longer_and_longer(nursery: Nursery) -> None:
    parent = nursery.start("a=exit:1", "relay=serve")

    parent.await_events("process.started", 5, role="a")

    announced = [event["retry_in_seconds"] for event in parent.events("process.exited", role="a")[:4]]
    # From a start, because an end is told of when its wait has begun already.
    waited = [seconds_between(*both) for both in pairwise(parent.events("process.started", role="a")[:5])]
    assert announced == [0.0, 0.1, 0.2, 0.4]
    # How much longer is the machine's affair.
    assert all(real > said - CLOCK_SECONDS for said, real in zip(announced, waited, strict=True)), waited


def test_a_wait_for_a_restart_does_not_delay_the_stop(nursery: Nursery) -> None:
    parent = nursery.start("patient=unfit:1", "relay=serve")
    waiting = parent.await_events("process.exited", role="patient")

    parent.send(signal.SIGTERM)

    assert parent.await_exit() == 0
    assert waiting["retry_in_seconds"] > DEADLINE_SECONDS


def test_who_does_not_drain_in_time_is_killed_and_the_exit_code_says_so(nursery: Nursery) -> None:
    parent = nursery.start("a=deaf", "b=serve", "relay=serve", drain_seconds=0)
    eventually(lambda: len(nursery.diary("serving")) == 3)

    parent.send(signal.SIGTERM)

    assert parent.await_exit() == 1
    killed = parent.events("process.killed")
    assert [event["role"] for event in killed] == ["a"]
    # The relay gets its time after that: it settles what the killed one left.
    assert [name for name, _ in nursery.diary("stopped")] == ["b", "relay"]
    assert not parent.members()


def test_signals_that_whoever_started_it_has_blocked_are_heard(nursery: Nursery) -> None:
    blocking = (
        "import os, signal, sys;"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD});"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    parent = nursery.start("a=exit:0", "b=serve", "relay=serve", by=[sys.executable, "-c", blocking])

    parent.await_events("process.started", 3, role="a")

    eventually(lambda: len(nursery.diary("serving")) == 2)
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def test_a_second_sigterm_kills_at_once(nursery: Nursery) -> None:
    parent = nursery.start("a=deaf", "relay=deaf", drain_seconds=600)
    eventually(lambda: len(nursery.diary("serving")) == 2)
    began_at = time.monotonic()
    parent.send(signal.SIGTERM)
    parent.await_events("dispatcher.draining", signal="SIGTERM")

    def killed() -> bool:
        parent.send(signal.SIGTERM)
        return bool(parent.events("process.killed"))

    eventually(killed)
    # Those that follow at once are taken for the first one again.
    assert time.monotonic() - began_at > REPEATED_SECONDS
    assert parent.await_exit() == 1
    # Perhaps more than once: our next signal may come before one that is killed has ended.
    assert {event["role"] for event in parent.events("process.killed")} == {"a", "relay"}
    assert not parent.members()


def test_ctrl_c_in_a_terminal_is_one_drain(nursery: Nursery) -> None:
    parent = nursery.start("a=serve:0.2", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 2)

    parent.send_all(signal.SIGINT)  # a terminal sends it to the children, too

    assert parent.await_exit() == 0
    assert parent.events("dispatcher.draining")[0]["signal"] == "SIGINT"
    assert [name for name, _ in nursery.diary("stopped")] == ["a", "relay"]
    assert "Traceback" not in parent.words


def test_a_terminal_that_closes_is_one_drain(nursery: Nursery) -> None:
    ours, theirs = os.openpty()
    # The first terminal that a session's first process opens is its own from then on.
    opening = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
    parent = nursery.start("a=serve:0.2", "relay=serve", by=[sys.executable, "-c", opening, os.ttyname(theirs)])
    os.close(theirs)
    eventually(lambda: len(nursery.diary("serving")) == 2)

    os.close(ours)

    assert parent.await_exit() == 0
    assert parent.events("dispatcher.draining")[0]["signal"] == "SIGHUP"
    assert [name for name, _ in nursery.diary("stopped")] == ["a", "relay"]


@pytest.mark.parametrize("kind", ["signal", "lifeline", "serve:0.3"])
def test_children_notice_that_their_parent_is_gone(nursery: Nursery, kind: str) -> None:
    parent = nursery.start(f"a={kind}", f"b={kind}", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 3)

    parent.send(signal.SIGKILL)

    parent.await_exit()
    parent.await_all_gone()
    assert sorted(name for name, _ in nursery.diary("stopped")) == ["a", "b", "relay"]


def test_nobody_outlives_a_parent_that_is_killed_while_it_replaces_them(nursery: Nursery) -> None:
    parent = nursery.start("worker*2=serve:0.1", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 3)
    nursery.change_roles("worker*2=signal", "relay=serve")
    parent.send(signal.SIGHUP)
    parent.await_events("process.started", 4)

    parent.send(signal.SIGKILL)

    parent.await_exit()
    parent.await_all_gone()


def test_children_that_are_just_being_born_do_not_outlive_their_parent(nursery: Nursery) -> None:
    for _ in range(5):
        parent = nursery.start("eager-a=exit:0", "eager-b=exit:0", "b=serve", "relay=serve")
        parent.await_events("process.exited", 20)

        parent.send(signal.SIGKILL)

        parent.await_exit()
        parent.await_all_gone()


def test_a_run_directory_that_others_may_write_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run").chmod(0o770)

    parent = nursery.start("a=serve", "relay=serve")

    assert parent.await_exit() != 0
    assert "DISPATCHER_RUN_DIR" in parent.words
    assert not nursery.diary("serving")


def test_what_an_earlier_run_has_counted_goes_even_where_nobody_counts_any_more(
    nursery: Nursery, tmp_path: Path
) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "counter_w0-0.db").write_bytes(b"of an earlier run")

    nursery.start("a=serve", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 2)

    assert not list((tmp_path / "metrics").iterdir())


def test_a_second_parent_in_the_same_run_directory_is_refused_in_clear_words(nursery: Nursery, tmp_path: Path) -> None:
    first = nursery.start("a=serve", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 2)

    second = nursery.start("a=serve", "relay=serve")

    assert second.await_exit() != 0
    assert f"Another `dispatcher run` uses the run directory {tmp_path / 'run'}." in second.words
    assert len(nursery.diary("serving")) == 2
    first.send(signal.SIGTERM)
    assert first.await_exit() == 0


def test_a_new_parent_may_start_while_an_orphan_still_drains(nursery: Nursery) -> None:
    first = nursery.start("a=serve:30", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 2)
    orphan = first.pid_of("a")
    first.send(signal.SIGKILL)
    first.await_exit()
    eventually(lambda: ("a", orphan) in nursery.diary("stopping"))

    second = nursery.start("a=serve", "relay=serve")

    eventually(lambda: len(nursery.diary("serving")) == 4)
    assert is_alive(orphan)
    second.send(signal.SIGTERM)
    assert second.await_exit() == 0


def test_a_parent_may_start_again_where_one_was_killed(nursery: Nursery) -> None:
    first = nursery.start("a=serve", "relay=serve")
    eventually(lambda: len(nursery.diary("serving")) == 2)
    first.send_all(signal.SIGKILL)
    first.await_exit()

    second = nursery.start("a=serve", "relay=serve")

    eventually(lambda: len(nursery.diary("serving")) == 4)
    second.send(signal.SIGTERM)
    assert second.await_exit() == 0


def test_a_log_that_cannot_be_written_ends_nobody(nursery: Nursery) -> None:
    parent = nursery.start("a=chat", "b=serve", "relay=serve", stdout=Path("/dev/full"))

    eventually(lambda: len(nursery.diary("chatted")) >= 5)

    eventually(lambda: len(nursery.diary("serving")) == 2)
    assert not nursery.diary("escaped")
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0
    assert not parent.members()


def test_a_hundred_restarts_leave_neither_descriptors_nor_zombies(nursery: Nursery) -> None:
    parent = nursery.start("eager=exit:0", "relay=serve")
    parent.await_events("process.exited", 10, role="eager")
    before = descriptors(parent.pid)

    parent.await_events("process.exited", 110, role="eager")

    assert descriptors(parent.pid) <= before  # one that was starting just then may have been counted
    assert len(set(nursery.words("descriptors="))) == 1
    # At most the one that has just ended and is about to be reaped.
    eventually(lambda: not [entry for entry in processes() if entry.parent == parent.pid and entry.state == "Z"])
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0


def seconds_between(earlier: dict[str, str], later: dict[str, str]) -> float:
    return (datetime.fromisoformat(later["timestamp"]) - datetime.fromisoformat(earlier["timestamp"])).total_seconds()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
