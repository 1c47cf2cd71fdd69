"""A real supervisord with our configuration file starts, restarts and stops the dispatcher."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.acceptance.harness import DISPATCHER, WORKERS, Host, emails
from tests.supervisor.program import CHECKOUT, Program, eventually, is_alive

CONFIGURATION: Final = CHECKOUT / "deploy" / "supervisord.conf"
BIN: Final = Path(sys.executable).parent
STALE_WORKERS: Final = WORKERS + 5
EMAILS: Final = 700


class Supervised:
    def __init__(self, host: Host, **settings: object) -> None:
        self._host = host
        self.env_file = host.folder / "dispatcher.env"
        self.write(**settings)
        here = {
            "/var/log/email-dispatcher": str(host.folder),
            "/etc/email-dispatcher/dispatcher-api.env": str(self.env_file),
            "/etc/email-dispatcher/dispatcher.env": str(self.env_file),
            "/opt/email-dispatcher/bin/dispatcher": shlex.join(DISPATCHER),
        }
        text = re.sub(r"(?m)^user=.*", f"user={getpass.getuser()}", CONFIGURATION.read_text())
        for place, ours in here.items():
            assert place in text
            text = text.replace(place, ours)
        self._configuration = host.folder / "supervisord.conf"
        self._configuration.write_text(text)
        argv = [str(BIN / "supervisord"), "--nodaemon", "--configuration", str(self._configuration)]
        # supervisord passes on the environment of the shell that started it.
        older = {"PATH": os.defpath, "DISPATCHER_WORKERS": str(STALE_WORKERS), "DISPATCHER_PREFETCH": "mistaken"}
        self.program: Program = host.program(argv, "supervisord", env=older)

    def write(self, **settings: object) -> None:
        env = self._host.environment(**settings)
        self.env_file.write_text("".join(f"{name}={value}\n" for name, value in env.items() if name != "PATH"))

    def started_with(self, life: int) -> int:
        """The number of workers in the n-th start of `dispatcher run`, counted from 1. Waits for that start."""
        return int(self.await_event("dispatcher.started", life)["workers"])

    def await_event(self, name: str, times: int = 1) -> dict[str, Any]:
        log = self._host.folder / "dispatcher.log"

        def found() -> list[dict[str, Any]]:
            lines = log.read_text().splitlines() if log.exists() else []
            events = [json.loads(line) for line in lines if line.startswith("{")]
            return [event for event in events if event["event"] == name][times - 1 : times]

        return eventually(found, f"{name}, {times} times")[0]

    def control(self, *words: str) -> str:
        argv = [str(BIN / "supervisorctl"), "--configuration", str(self._configuration), *words]
        return subprocess.run(
            argv, env={"PATH": os.defpath}, capture_output=True, text=True, timeout=60, check=False
        ).stdout

    @property
    def parent(self) -> int:
        (pid,) = self.program.children()
        return pid

    def end(self) -> None:
        self.program.send(signal.SIGTERM)
        assert self.program.await_exit() == 0


def test_restarts_kills_and_new_settings_repeat_no_email_and_a_stop_is_not_undone(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(EMAILS))
    supervised = Supervised(host)
    host.await_delivered(100)
    assert supervised.started_with(life=1) == WORKERS  # and not the number in the environment of supervisord

    restarted = supervised.parent
    assert Path(f"/proc/{restarted}/cmdline").read_text().startswith("dispatcher: run")
    supervised.write(WORKERS=1)
    supervised.control("restart", "dispatcher")
    assert not is_alive(restarted)
    assert supervised.started_with(life=2) == 1
    host.await_delivered(300)
    killed = supervised.parent
    os.kill(killed, signal.SIGKILL)
    supervised.started_with(life=3)
    supervised.write(WORKERS=2, PREFETCH=16)
    supervised.control("signal", "HUP", "dispatcher")
    assert supervised.await_event("config.restart_required")["variables"] == ["DISPATCHER_WORKERS"]
    supervised.await_event("dispatcher.reloaded")

    books = host.await_finished(ids)
    last = supervised.parent
    assert last not in (restarted, killed)
    supervised.control("stop", "dispatcher")
    assert not is_alive(last)
    eventually(lambda: supervised.program.members() == [supervised.program.pid], "the end of the processes")
    supervised.end()
    assert "stopped: dispatcher (exit status 0)" in supervised.program.log
    assert supervised.program.log.count("spawned: 'dispatcher'") == 3
    books.assert_balanced()
    assert books.counts == {"sent": EMAILS}


def test_invalid_settings_cause_no_restart_loop(host: Host) -> None:
    supervised = Supervised(host, PROVIDERS="smtp", SMTP_URL="ftp://nowhere")

    eventually(lambda: "exit status 78; expected" in supervised.program.log, "the exit")
    supervised.end()
    assert supervised.program.log.count("spawned: 'dispatcher'") == 1
