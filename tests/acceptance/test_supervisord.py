"""A real supervisord with the file that we ship: what it starts, restarts and stops loses and repeats nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.harness import Host, emails
from tests.supervisor.program import CHECKOUT, Program, eventually, is_alive

CONFIGURATION: Final = CHECKOUT / "deploy" / "supervisord.conf"
BIN: Final = Path(sys.executable).parent


class Supervised:
    """A supervisord with a host's settings in its environment."""

    def __init__(self, host: Host, **settings: object) -> None:
        self._env = host.environment(LOG_DIR=host.folder, **settings) | {"PATH": f"{BIN}:{os.defpath}"}
        argv = [str(BIN / "supervisord"), "--nodaemon", "--configuration", str(CONFIGURATION)]
        self.program: Program = host.program(argv, "supervisord", env=self._env)

    def control(self, *words: str) -> str:
        """What `supervisorctl` answers."""
        argv = [str(BIN / "supervisorctl"), "--configuration", str(CONFIGURATION), *words]
        return subprocess.run(argv, env=self._env, capture_output=True, text=True, timeout=60, check=False).stdout

    def await_state(self, state: str) -> None:
        """Waits until the program is in this state of supervisord's."""
        eventually(lambda: state in self.control("status", "dispatcher"), lambda: self.control("status"))

    @property
    def parent(self) -> int:
        """The process of `dispatcher run`; waits until there is one."""

        def told() -> int:
            answer = self.control("pid", "dispatcher").strip()
            return int(answer) if answer.isdigit() else 0

        return eventually(told, lambda: self.control("status"))


def test_restarted_killed_and_stopped_it_sends_each_email_once(host: Host) -> None:
    host.sink("--latency-ms", "5")
    ids = host.enqueue(emails(2000))
    supervised = Supervised(host)
    host.await_delivered(300)

    restarted = supervised.parent
    supervised.control("restart", "dispatcher")
    assert not is_alive(restarted)
    host.await_delivered(1000)
    killed = supervised.parent
    os.kill(killed, signal.SIGKILL)

    books = host.await_finished(ids)
    assert supervised.parent not in (restarted, killed)
    supervised.program.send(signal.SIGTERM)
    assert supervised.program.await_exit() == 0
    supervised.program.await_all_gone(5)
    books.assert_balanced()
    assert books.counts == {"sent": 2000}


@pytest.mark.parametrize("settings", [{"PROVIDERS": ""}, {"PROVIDERS": "smtp", "SMTP_URL": "ftp://nowhere"}])
def test_settings_that_cannot_work_are_not_tried_again_and_again(host: Host, settings: dict[str, str]) -> None:
    supervised = Supervised(host, **settings)

    supervised.await_state("EXITED")

    supervised.program.send(signal.SIGTERM)
    supervised.program.await_exit()
    assert "exit status 78; expected" in supervised.program.log
    assert supervised.program.log.count("spawned: 'dispatcher'") == 1


def test_a_stop_is_a_drain_and_not_undone(host: Host) -> None:
    supervised = Supervised(host)
    parent = supervised.parent
    log = host.folder / "dispatcher.log"
    eventually(lambda: log.exists() and "broker.connected" in log.read_text(), "a worker that consumes")

    supervised.control("stop", "dispatcher")

    supervised.await_state("STOPPED")
    assert not is_alive(parent)
    assert supervised.program.members() == [supervised.program.pid]
    supervised.program.send(signal.SIGTERM)
    supervised.program.await_exit()
    assert "stopped: dispatcher (exit status 0)" in supervised.program.log
