"""`Outages` stops and restarts servers at the planned times. Small programs stand in for the servers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatcher.dev.keeper import Plan
from dispatcher.dev.processes import Processes
from dispatcher.dev.servers import Servers
from tests.acceptance.outages import POSTGRES, RABBITMQ, StoppableServers
from tests.chaos.outages import Outages
from tests.supervisor.program import eventually

LONG_SECONDS = 3600.0


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[StoppableServers]:
    """Two programs that run and never answer."""
    processes = Processes(tmp_path)
    processes.spawn_keeper(owner_pid=None)
    for name in (POSTGRES, RABBITMQ):
        processes.launch(name, _sleeper(tmp_path, name))
    eventually(lambda: set(processes.running()) == {POSTGRES, RABBITMQ}, "both run")
    nowhere = "postgresql://127.0.0.1:1/nothing", "amqp://127.0.0.1:1/", "http://127.0.0.1:1"
    yield StoppableServers(Servers(*nowhere, tmp_path, owned=False, postgres_source="", rabbitmq_source=""))
    processes.stop()


def _sleeper(folder: Path, name: str) -> Plan:
    return Plan(
        argv=["/bin/sleep", "600"],
        env={"PATH": os.defpath},
        cwd=str(folder),
        log=str(folder / "log" / f"{name}.log"),
        stop=["SIGTERM"],
        orphaned="SIGKILL",
    )


def test_a_server_that_restarted_together_with_another_counts_as_running(ground: StoppableServers) -> None:
    outages = Outages(ground, (POSTGRES, RABBITMQ))
    outages.stop(POSTGRES, signal.SIGKILL, LONG_SECONDS)
    eventually(lambda: ground.has_ended(POSTGRES), "the end of one")
    outages.stop(RABBITMQ, signal.SIGKILL, 0.0)

    def is_launched(name: str) -> bool:
        outages.step()
        return f"{name} does not answer" in outages.unfinished

    eventually(lambda: is_launched(RABBITMQ), "the launch of the second server, and of all that are down")
    assert outages.unfinished == f"{POSTGRES} is down, {RABBITMQ} does not answer"
    eventually(lambda: len(Processes(ground.servers.folder).running()) == 2, "that both run again")
    outages.heal()

    eventually(lambda: is_launched(POSTGRES), "the launch of the first server is noticed")


def test_a_server_stays_down_until_its_planned_time(ground: StoppableServers) -> None:
    outages = Outages(ground, (POSTGRES,))
    outages.stop(POSTGRES, signal.SIGKILL, LONG_SECONDS)
    eventually(lambda: ground.has_ended(POSTGRES), "its end")

    outages.step()

    assert outages.unfinished == f"{POSTGRES} is down"
    assert ground.has_ended(POSTGRES)


def test_a_server_that_ends_during_its_start_is_started_again(ground: StoppableServers, tmp_path: Path) -> None:
    # PostgreSQL refuses to start while processes of the killed server still use the shared memory. This program does
    # the same.
    refusals = tmp_path / "refusals"
    outages = Outages(ground, (POSTGRES,))
    outages.stop(POSTGRES, signal.SIGKILL, LONG_SECONDS)
    eventually(lambda: ground.has_ended(POSTGRES), "its end")
    plan = _sleeper(tmp_path, POSTGRES)
    plan["argv"] = ["/bin/sh", "-c", f"echo >> {refusals}; [ $(wc -l < {refusals}) -gt 2 ] && exec sleep 600"]
    (ground.servers.folder / "plan" / f"{POSTGRES}.json").write_text(json.dumps(plan))
    outages.heal()

    def runs() -> bool:
        outages.step()
        return refusals.exists() and refusals.read_bytes() == b"\n\n\n" and not ground.has_ended(POSTGRES)

    eventually(runs, "the third start")
