"""The keeper starts, watches and stops processes; shell scripts stand in for the servers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatcher.dev import keeper
from dispatcher.dev.keeper import Plan, ProcessIdentity
from dispatcher.dev.processes import Processes
from tests.waiting import wait_until


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """The processes of a folder whose keeper has no owner."""
    processes = Processes(tmp_path)
    processes.spawn_keeper(owner_pid=None)
    yield processes
    processes.stop()


def shell(folder: Path, script: str) -> Plan:
    """A plan that runs a shell script."""
    return Plan(
        argv=["/bin/sh", "-c", script],
        env={"PATH": os.defpath},
        cwd=str(folder),
        log=str(folder / "log" / "shell.log"),
        stop=["SIGTERM"],
        orphaned="SIGKILL",
    )


def launched(processes: Processes, plan: Plan) -> int:
    """The id of the process of this plan."""
    processes.launch("shell", plan)
    return wait_until(lambda: processes.running().get("shell", 0))


def test_stop_ends_processes_and_their_orphaned_grandchildren(processes: Processes) -> None:
    stray = processes.folder / "stray.pid"
    script = f"setsid sh -c 'trap \"\" TERM; echo $$ > {stray}; while :; do sleep 1; done' & exec sleep 600"
    pid = launched(processes, shell(processes.folder, script))
    wait_until(lambda: stray.exists() and stray.read_text().endswith("\n"))
    family = [pid, int(stray.read_text())]

    stopped = processes.stop()

    assert stopped == ["shell"]
    assert [pid for pid in family if keeper.identify(pid)] == []
    assert processes.keeper() is None


def test_stop_does_not_kill_a_later_process_with_a_recorded_pid(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as stranger:
        outdated = ProcessIdentity(stranger.pid, "another boot/1")
        record = {"keeper": [1, "another boot/1"], "owner": [], "running": {"postgres": list(outdated)}, "exited": {}}
        keeper.replace_json(tmp_path / "keeper.json", record)

        assert Processes(tmp_path).stop() == []
        assert stranger.poll() is None
        stranger.kill()


def test_an_exit_report_has_the_exit_code_and_the_end_of_the_log(processes: Processes) -> None:
    processes.launch("shell", shell(processes.folder, "echo no space left >&2; exit 3"))

    words = wait_until(lambda: processes.exit_report("shell") or "")

    assert "exited with code 3" in words
    assert "no space left" in words
    assert str(processes.folder / "log" / "shell.log") in words
