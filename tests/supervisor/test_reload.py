"""The parent replaces processes while other processes work: after SIGHUP, or at a worker's request. A reload also adds
or removes workers."""

from __future__ import annotations

import signal

import pytest

from tests.supervisor.conftest import ParentStarter, stop
from tests.supervisor.program import Program, eventually

EVERYBODY = {"worker 0", "worker 1", "relay", "monitor"}
BROKEN = ("worker*2=unfit:1", "relay=serve", "monitor=serve")
"""Workers that never get up, so the parent replaces no process."""
WORKING = ("worker*2=serve", "relay=serve", "monitor=serve")


@pytest.fixture
def parent(starter: ParentStarter) -> Program:
    """A parent with two workers, a relay and a monitor, all of them up."""
    program = starter.start(*WORKING)
    eventually(lambda: len(starter.diary("serving")) == 4)
    return program


def test_a_reload_replaces_all_processes_and_never_has_fewer_workers(parent: Program, starter: ParentStarter) -> None:
    before = {parent.pid_of(role) for role in EVERYBODY}

    parent.send(signal.SIGHUP)

    parent.await_events("dispatcher.reloaded")
    ends = parent.events("process.exited")
    assert {(end["reason"], end["exit_status"]) for end in ends} == {("reloaded", "exit 0")}
    assert {end["pid"] for end in ends} == before
    assert [end["role"].split()[0] for end in ends] == ["worker", "worker", "relay", "monitor"]
    eventually(lambda: len(starter.diary("serving")) == 8)
    assert fewest_workers(starter, of=2) == 2
    # Each name stands for one slot, and a slot is for one process. The sort is stable: of two events at the same time,
    # an exit comes first.
    running: list[str] = []
    for event in sorted(ends + parent.events("process.started"), key=lambda event: event["timestamp"]):
        if event["event"] == "process.exited":
            running.remove(event["role"])
        else:
            assert event["role"] not in running
            running.append(event["role"])
    stop(parent)


def test_reloads_during_a_reload_act_as_one(parent: Program, starter: ParentStarter) -> None:
    starter.change_roles(*BROKEN)
    for count in (1, 2):
        parent.send(signal.SIGHUP)
        parent.await_events("dispatcher.reloading", count)

    starter.change_roles(*WORKING)
    parent.send(signal.SIGHUP)

    parent.await_events("dispatcher.reloaded")
    stop(parent)
    assert len(parent.events("process.exited", reason="reloaded")) == 4
    assert len(parent.events("dispatcher.reloading")) == 3
    assert len(parent.events("dispatcher.reloaded")) == 1


def test_a_failed_reload_stops_no_process_and_the_next_reload_fixes_it(parent: Program, starter: ParentStarter) -> None:
    starter.change_roles()
    parent.send(signal.SIGHUP)
    assert parent.await_events("dispatcher.reload_failed")["reason"] == "TOY_ROLES is empty."
    assert not parent.events("process.exited")
    starter.change_roles(*BROKEN)
    parent.send(signal.SIGHUP)
    parent.await_events("process.exited", 2, reason="could_not_boot")
    assert not parent.events("process.exited", reason="reloaded")
    assert fewest_workers(starter, of=2) == 2
    # A worker that dies before its successor is up is replaced anyway.
    parent.send_to(parent.pid_of("worker 0"), signal.SIGKILL)
    parent.await_events("process.exited", role="worker 0", reason="crashed")

    starter.change_roles(*WORKING)
    parent.send(signal.SIGHUP)

    parent.await_events("dispatcher.reloaded")
    eventually(lambda: len(parent.children()) == 4)
    stop(parent)


def test_a_stop_interrupts_a_reload(parent: Program, starter: ParentStarter) -> None:
    starter.change_roles(*BROKEN)
    parent.send(signal.SIGHUP)
    parent.await_events("process.exited", reason="could_not_boot")

    parent.send(signal.SIGTERM)
    parent.send(signal.SIGHUP)

    assert parent.await_exit() == 0
    assert [name for name, _ in starter.diary("stopped")][:2] == ["worker", "worker"]
    assert not parent.members()


def test_workers_that_ask_for_a_successor_are_replaced_one_at_a_time(starter: ParentStarter) -> None:
    parent = starter.start("worker*3=retire", "relay=serve")

    parent.await_events("process.exited", 6, reason="recycled")

    assert fewest_workers(starter, of=3) == 3
    assert not parent.events("process.exited", role="relay")
    stop(parent)


def test_workers_can_be_added_and_removed_down_to_one(parent: Program, starter: ParentStarter) -> None:
    parent.send(signal.SIGTTIN)
    assert parent.await_events("dispatcher.scaled")["workers"] == 3
    eventually(lambda: len(starter.diary("serving")) == 5)

    for count in range(2, 6):
        parent.send(signal.SIGTTOU)
        parent.await_events("dispatcher.scaled", count)

    assert [event["workers"] for event in parent.events("dispatcher.scaled")] == [3, 2, 1, 1, 1]
    parent.await_events("process.exited", 2)
    ends = {(end["role"], end["reason"]) for end in parent.events("process.exited")}
    assert ends == {("worker 2", "scaled_down"), ("worker 1", "scaled_down")}
    stop(parent)


def fewest_workers(starter: ParentStarter, *, of: int) -> int:
    """The lowest number of workers that served at the same time. The count begins when `of` workers serve, because a
    worker may start late."""
    serving = 0
    served: list[int] = []
    for name, _, word in starter.lines():
        serving += {"serving": 1, "stopping": -1}.get(word, 0) if name == "worker" else 0
        if served or serving == of:
            served.append(serving)
    return min(served)
