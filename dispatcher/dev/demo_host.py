"""The processes of a demo: servers, a local SMTP server and `dispatcher run`. All stop when the demo ends.

Their parent process is a keeper (see `keeper`). It stops them even if this process is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from dispatcher.config import PREFIX, Settings, load
from dispatcher.dev import keeper
from dispatcher.dev.command import last_lines
from dispatcher.dev.demo_folder import demo_servers, locked_folder
from dispatcher.dev.keeper import Plan
from dispatcher.dev.processes import Processes, await_condition
from dispatcher.dev.servers import Progress
from dispatcher.errors import DispatcherError, ServerUnavailable
from dispatcher.store.queries import schema

RUN: Final = "run"
SMTP: Final = "smtp"
SMTP_LATENCY_MS: Final = 15
"""The delay before the answer to an email, similar to that of a provider in the same country. Without a delay, no email
would be on the wire when the worker is killed."""
READY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 40.0
SETTINGS: Final = {
    "DISPATCHER_PROVIDERS": "smtp",
    # The prefetch window is small, so that each worker gets emails even in a small demo. The window is still far
    # larger than the number of connections, so no connection waits for emails.
    "DISPATCHER_PREFETCH": "64",
    # The lease length matters only if the in-flight ledger fails. With the ledger, the relay recovers a killed worker's
    # emails immediately.
    "DISPATCHER_LEASE_SECONDS": "20",
    "DISPATCHER_HANG_SECONDS": "10",
    "DISPATCHER_RETRY_BASE_SECONDS": "0.5",
    "DISPATCHER_DRAIN_SECONDS": "20",
    "DISPATCHER_LOG_FORMAT": "json",
    # The demo serves no metrics, because a dispatcher that already runs on this machine might use the port.
    "DISPATCHER_METRICS_ADDRESS": "off",
}
_LAST_LINES: Final = 12
_WORKER_TITLE: Final = b"dispatcher: worker"


@dataclass(frozen=True, slots=True)
class DemoHost:
    """The folder, the settings and the processes of a demo."""

    folder: Path
    environment: Mapping[str, str]
    settings: Settings
    processes: Processes

    @property
    def run_log(self) -> Path:
        """The log of `dispatcher run` and its processes: one JSON object per line."""
        return self.folder / "log" / f"{RUN}.log"

    @property
    def ledger(self) -> Path:
        return self.folder / SMTP / "ledger.jsonl"

    @property
    def wire(self) -> Path:
        return self.folder / SMTP / "wire.jsonl"

    def initialise(self) -> list[str]:
        """Runs `dispatcher init`; returns the lines of its output."""
        finished = subprocess.run(
            _program("init"), env=self.environment, capture_output=True, text=True, errors="replace", check=False
        )
        if finished.returncode != 0:
            output = last_lines(finished.stderr, 4)
            raise DispatcherError(f"`dispatcher init` exited with code {finished.returncode}: {output}")
        return finished.stdout.splitlines()

    def start_run(self) -> None:
        """Starts `dispatcher run`, and waits until every worker consumes. The error has the end of its log."""
        self.processes.launch(RUN, _plan(self.folder, RUN, _program("run"), self.environment, ["SIGTERM"]))
        await_condition(
            lambda: self._consuming_workers() >= self.settings.workers,
            seconds=READY_SECONDS,
            broken=self.exit_report,
            what="`dispatcher run`",
            log=self.run_log,
        )

    def kill_worker(self) -> int | None:
        """Kills a worker with SIGKILL; returns its pid, or None if there is no worker."""
        workers = [pid for pid in keeper.descendants(self._run_pid() or 0) if _title(pid).startswith(_WORKER_TITLE)]
        if not workers:
            return None
        os.kill(workers[0], signal.SIGKILL)
        return workers[0]

    def stop_run(self) -> int | None:
        """Sends SIGTERM to `dispatcher run`. Returns the exit code; None if it did not exit in time. Idempotent."""
        if pid := self._run_pid():
            keeper.send(pid, signal.SIGTERM)
        with suppress(ServerUnavailable):
            await_condition(
                lambda: self._exit_code() is not None,
                seconds=STOP_SECONDS,
                broken=lambda: None,
                what="the exit of the run",
            )
        return self._exit_code()

    def exit_report(self) -> str | None:
        """The exit code of `dispatcher run` and the end of its log, as text; None while it is running."""
        return self.processes.exit_report(RUN)

    def events(self) -> list[Mapping[str, Any]]:
        """The events in the log of `dispatcher run` so far. Skips other lines, such as stack traces."""
        return read_events(self.run_log)

    def log_tail(self) -> str:
        """The last lines of the log of `dispatcher run`, without the many events `email.attempted`."""
        lines = self.run_log.read_text(errors="replace").splitlines() if self.run_log.exists() else []
        notable = [line for line in lines if '"email.attempted"' not in line]
        return "\n".join([f"the end of {self.run_log}, without the attempts:", *notable[-_LAST_LINES:]])

    def _consuming_workers(self) -> int:
        connected = [event for event in self.events() if event["event"] == "broker.connected" and "queues" in event]
        return len({event["worker"] for event in connected})

    def _run_pid(self) -> int | None:
        return self.processes.running().get(RUN)

    def _exit_code(self) -> int | None:
        record = self.processes.record()
        return record["exited"].get(RUN) if record else None


@contextmanager
def open_demo_host(folder: Path, *, workers: int, progress: Progress) -> Iterator[DemoHost]:
    """Starts the servers and a local SMTP server, but not `dispatcher run`. Afterwards, stops every process."""
    folder = folder.absolute()
    with locked_folder(folder), demo_servers(folder / "servers", progress) as names:
        processes = Processes(folder)
        processes.spawn_keeper(os.getpid())
        try:
            port = _start_smtp(processes)
            progress(f"a local SMTP server listens on port {port} and records deliveries")
            ours = {
                "DISPATCHER_DATABASE_SCHEMA": schema(),  # the same schema as in this process
                "DISPATCHER_SMTP_URL": f"smtp://127.0.0.1:{port}?tls=none",
                "DISPATCHER_RUN_DIR": str(folder / RUN),
            }
            environment = _environment_without_settings() | names | SETTINGS | ours
            environment["DISPATCHER_WORKERS"] = str(workers)
            yield DemoHost(folder, environment, load(environment), processes)
        finally:
            processes.stop()


def _environment_without_settings() -> dict[str, str]:
    """This process's environment without the dispatcher's settings, which must not affect the demo."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def _start_smtp(processes: Processes) -> int:
    words = ["--folder", str(processes.folder / SMTP), "--latency-ms", str(SMTP_LATENCY_MS), "--wire"]
    argv = [sys.executable, "-m", "dispatcher.dev.smtp_sink", *words]
    plan = _plan(processes.folder, SMTP, argv, _environment_without_settings(), ["SIGTERM"])
    processes.launch(SMTP, plan)
    log = Path(plan["log"])
    await_condition(
        lambda: bool(read_events(log)),
        seconds=READY_SECONDS,
        broken=lambda: processes.exit_report(SMTP),
        what="the local SMTP server",
        log=log,
    )
    return int(read_events(log)[0]["port"])


def read_events(path: Path) -> list[Mapping[str, Any]]:
    """The JSON objects in a file, one per complete line; empty if the file does not exist. Skips all other lines."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [orjson.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]


def _program(command: str) -> list[str]:
    return [sys.executable, "-m", "dispatcher.cli.main", command]


def _plan(folder: Path, name: str, argv: Sequence[str], environment: Mapping[str, str], stop: list[str]) -> Plan:
    log = str(folder / "log" / f"{name}.log")
    # If the keeper is killed, the kernel sends SIGTERM to `dispatcher run` and to the SMTP server. Then
    # `dispatcher run` drains and reaps its children, and the SMTP server exits immediately.
    return Plan(argv=list(argv), env=dict(environment), cwd=str(folder), log=log, stop=stop, orphaned="SIGTERM")


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
