"""The storm's books of what is away, with a real keeper and cheap programs in the servers' place."""

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
from tests.acceptance.outages import POSTGRES, RABBITMQ, Removable
from tests.chaos.outages import Outages
from tests.supervisor.program import eventually

LONG_SECONDS = 3600.0


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Removable]:
    """Two programs that run, and that answer nobody."""
    processes = Processes(tmp_path)
    processes.spawn_keeper(owner_pid=None)
    for name in (POSTGRES, RABBITMQ):
        processes.launch(name, _sleeper(tmp_path, name))
    eventually(lambda: set(processes.running()) == {POSTGRES, RABBITMQ}, "both run")
    nowhere = "postgresql://127.0.0.1:1/nothing", "amqp://127.0.0.1:1/", "http://127.0.0.1:1"
    yield Removable(Servers(*nowhere, tmp_path, owned=False, postgres_source="", rabbitmq_source=""))
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


def test_a_server_that_came_back_with_another_is_not_waited_for_as_if_it_were_gone(ground: Removable) -> None:
    outages = Outages(ground, (POSTGRES, RABBITMQ))
    outages.take_away(POSTGRES, signal.SIGKILL, LONG_SECONDS)
    eventually(lambda: ground.is_gone(POSTGRES), "the end of one")
    outages.take_away(RABBITMQ, signal.SIGKILL, 0.0)

    def is_launched(name: str) -> bool:
        outages.step()
        return f"{name} does not answer" in outages.told

    eventually(lambda: is_launched(RABBITMQ), "the launch of the other, and of all that are gone")
    assert outages.told == f"{POSTGRES} is gone, {RABBITMQ} does not answer"
    eventually(lambda: len(Processes(ground.servers.folder).running()) == 2, "that both run again")
    outages.heal()

    eventually(lambda: is_launched(POSTGRES), "that the first is known to be there")


def test_a_server_stays_away_until_its_time_has_come(ground: Removable) -> None:
    outages = Outages(ground, (POSTGRES,))
    outages.take_away(POSTGRES, signal.SIGKILL, LONG_SECONDS)
    eventually(lambda: ground.is_gone(POSTGRES), "its end")

    outages.step()

    assert outages.told == f"{POSTGRES} is gone"
    assert ground.is_gone(POSTGRES)


def test_a_server_that_ends_as_it_starts_is_started_again(ground: Removable, tmp_path: Path) -> None:
    # As PostgreSQL does while processes of the one before hold its memory.
    refusals = tmp_path / "refusals"
    outages = Outages(ground, (POSTGRES,))
    outages.take_away(POSTGRES, signal.SIGKILL, LONG_SECONDS)
    eventually(lambda: ground.is_gone(POSTGRES), "its end")
    plan = _sleeper(tmp_path, POSTGRES)
    plan["argv"] = ["/bin/sh", "-c", f"echo >> {refusals}; [ $(wc -l < {refusals}) -gt 2 ] && exec sleep 600"]
    (ground.servers.folder / "plan" / f"{POSTGRES}.json").write_text(json.dumps(plan))
    outages.heal()

    def runs() -> bool:
        outages.step()
        return refusals.exists() and refusals.read_bytes() == b"\n\n\n" and not ground.is_gone(POSTGRES)

    eventually(runs, "the third start")
