"""Signals that arrive during a fork: no signal is lost, and a child does not handle a signal with the parent's
handler."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.supervisor.parent_starter import ParentStarter
from tests.supervisor.program import Program, eventually


@pytest.fixture(params=[40, pytest.param(400, marks=pytest.mark.slow)])
def parents(request: pytest.FixtureRequest) -> int:
    """The number of parents to start."""
    return int(request.param)


@pytest.fixture
def storm(tmp_path: Path, parents: int) -> Iterator[Program]:
    """Runs the storm program, which stops this number of parents, each at a random moment."""
    argv = [sys.executable, "-m", "tests.supervisor.storm", str(parents)]
    program = Program(argv, tmp_path, "storm", env={"PATH": os.defpath})
    yield program
    program.destroy()


def test_a_stop_works_whatever_the_parent_is_doing(storm: Program, parents: int) -> None:
    ended = storm.await_events("storm.ended", seconds=5 * parents)

    assert ended["codes"] == {"0": parents}
    assert storm.await_exit() == 0
    assert not storm.members()


def test_a_signal_to_a_new_child_is_not_handled_as_the_parents(starter: ParentStarter) -> None:
    parent = starter.start("eager=signal", "relay=serve")
    relay = parent.pid_of("relay")
    eventually(lambda: any(pid == relay for _, pid in starter.diary("serving")))

    def a_hundred_ended_in_both_ways() -> bool:
        for pid in (pid for _ in range(1000) for pid in parent.children() if pid != relay):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert not parent.events("dispatcher.draining")
        ends = parent.events("process.exited", role="eager")
        # Some children must get the signal before they have installed handlers. Otherwise the test has missed the
        # critical moment.
        return len(ends) >= 100 and {event["exit_status"] for event in ends} >= {"exit 0", "signal SIGTERM"}

    eventually(a_hundred_ended_in_both_ways)

    assert parent.pid_of("relay") == relay
    ways = {event["exit_status"] for event in parent.events("process.exited", role="eager")}
    assert ways == {"exit 0", "signal SIGTERM"}
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0
