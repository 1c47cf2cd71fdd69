"""The keeper starts, watches and stops processes; shell scripts stand in for the servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dispatcher.dev import keeper
from dispatcher.dev.keeper import Plan, ProcessIdentity
from dispatcher.dev.processes import Processes
from dispatcher.errors import ServerUnavailable

Eventually = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """The processes of a folder whose keeper has no owner."""
    processes = Processes(tmp_path)
    processes.spawn_keeper(owner_pid=None)
    yield processes
    processes.stop()


def shell(folder: Path, script: str, *, orphaned: str = "SIGKILL") -> Plan:
    """A plan that runs a shell script."""
    return Plan(
        argv=["/bin/sh", "-c", script],
        env={"PATH": os.defpath},
        cwd=str(folder),
        log=str(folder / "log" / "shell.log"),
        stop=["SIGTERM"],
        orphaned=orphaned,
    )


def test_stop_ends_processes_and_their_orphaned_grandchildren(processes: Processes, eventually: Eventually) -> None:
    stray = processes.folder / "stray.pid"
    script = f"setsid sh -c 'trap \"\" TERM; echo $$ > {stray}; while :; do sleep 1; done' & exec sleep 600"
    processes.launch("shell", shell(processes.folder, script))
    eventually(lambda: stray.exists() and stray.read_text().endswith("\n"), "the grandchild runs")
    family = [processes.running()["shell"], int(stray.read_text())]

    stopped = processes.stop()

    assert stopped == ["shell"]
    assert [pid for pid in family if keeper.identify(pid)] == []
    assert processes.keeper() is None


def test_stop_is_idempotent(processes: Processes) -> None:
    processes.stop()

    assert processes.stop() == []


def test_stop_reaps_a_killed_keeper(processes: Processes, eventually: Eventually) -> None:
    processes.launch("shell", shell(processes.folder, "exec sleep 600"))
    eventually(lambda: "shell" in processes.running(), "the process runs")
    victim, pid = processes.keeper(), processes.running()["shell"]
    assert victim is not None

    os.kill(victim.pid, signal.SIGKILL)

    eventually(lambda: keeper.identify(pid) is None, "the process ended with its keeper")
    assert processes.stop() == []
    assert keeper.identify(victim.pid, even_a_zombie=True) is None


def test_stop_ends_processes_that_outlived_a_killed_keeper(processes: Processes, eventually: Eventually) -> None:
    script = "trap '' USR1; while :; do sleep 1; done"
    processes.launch("shell", shell(processes.folder, script, orphaned="SIGUSR1"))
    eventually(lambda: "shell" in processes.running(), "the process runs")
    victim, pid = processes.keeper(), processes.running()["shell"]
    assert victim is not None
    eventually(lambda: ignores(pid, signal.SIGUSR1), "the process ignores the signal")
    os.kill(victim.pid, signal.SIGKILL)
    eventually(lambda: processes.keeper() is None, "the keeper has exited")

    assert processes.stop() == ["shell"]
    assert keeper.identify(pid) is None


def test_stop_does_not_kill_a_later_process_with_a_recorded_pid(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as stranger:
        outdated = ProcessIdentity(stranger.pid, "another boot/1")
        record = {"keeper": [1, "another boot/1"], "owner": [], "running": {"postgres": list(outdated)}, "exited": {}}
        keeper.replace_json(tmp_path / "keeper.json", record)

        assert Processes(tmp_path).stop() == []
        assert stranger.poll() is None
        stranger.kill()


def test_processes_end_when_their_owner_is_killed(tmp_path: Path, eventually: Eventually) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        processes = Processes(tmp_path)
        processes.spawn_keeper(owner.pid)
        processes.launch("shell", shell(tmp_path, "exec sleep 600"))
        eventually(lambda: "shell" in processes.running(), "the process runs")
        guard, pid = processes.keeper(), processes.running()["shell"]
        assert guard is not None

        assert not processes.is_abandoned()

        owner.kill()

        eventually(lambda: not keeper.is_alive(guard), "the keeper has exited")
        assert keeper.identify(pid) is None
    processes.stop()


def test_a_process_that_has_exited_can_be_launched_again(processes: Processes, eventually: Eventually) -> None:
    plan = shell(processes.folder, "exec sleep 600")
    processes.launch("shell", plan)
    eventually(lambda: "shell" in processes.running(), "the process runs")
    first = processes.running()["shell"]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: processes.exit_report("shell") is not None, "the keeper noticed its death")

    processes.launch("shell", plan)

    eventually(lambda: processes.running().get("shell", first) != first, "it runs again")
    assert processes.exit_report("shell") is None


def test_an_exit_report_has_the_exit_code_and_the_end_of_the_log(processes: Processes, eventually: Eventually) -> None:
    processes.launch("shell", shell(processes.folder, "echo no space left >&2; exit 3"))
    eventually(lambda: processes.exit_report("shell") is not None, "the process ended")

    words = processes.exit_report("shell")

    assert words is not None
    assert "exited with code 3" in words
    assert "no space left" in words
    assert str(processes.folder / "log" / "shell.log") in words


def test_nothing_is_launched_without_a_keeper(processes: Processes) -> None:
    processes.stop()

    with pytest.raises(ServerUnavailable, match="stopped during their start"):
        processes.launch("shell", shell(processes.folder, "exec sleep 600"))


def ignores(pid: int, number: int) -> bool:
    """Whether the process ignores the signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return bool(mask >> (number - 1) & 1)
