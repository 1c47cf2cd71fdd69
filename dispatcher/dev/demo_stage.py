"""What a demo needs around it: servers, a local SMTP server and a `dispatcher run`, all of them gone at its end.

The processes are children of a keeper (see `keeper`), so that none outlives this process, however it ends.
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
from dispatcher.dev.demo_place import demo_servers, own_folder
from dispatcher.dev.keeper import Plan
from dispatcher.dev.processes import Processes, await_condition
from dispatcher.dev.servers import Progress
from dispatcher.errors import DispatcherError, ServerUnavailable
from dispatcher.store.queries import schema

RUN: Final = "run"
SMTP: Final = "smtp"
SMTP_LATENCY_MS: Final = 15
"""Before the answer to an email: about what a provider in the same country takes. Else a kill would meet nothing."""
READY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 40.0
SETTINGS: Final = {
    "DISPATCHER_PROVIDERS": "smtp",
    # A small window, so that both workers have a share of a small demo; it is far above the connections that send.
    "DISPATCHER_PREFETCH": "64",
    # Not needed for the recovery from a kill, which the in-flight ledger does at once: only if that failed.
    "DISPATCHER_LEASE_SECONDS": "20",
    "DISPATCHER_HANG_SECONDS": "10",
    "DISPATCHER_RETRY_BASE_SECONDS": "0.5",
    "DISPATCHER_DRAIN_SECONDS": "20",
    "DISPATCHER_LOG_FORMAT": "json",
    # The host's own dispatcher may have it.
    "DISPATCHER_METRICS_ADDRESS": "off",
}
_LAST_LINES: Final = 12
_WORKER_TITLE: Final = b"dispatcher: worker"


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything in its place.

    Attributes:
        environment: The whole environment of our programs.
        settings: The same, as they read it.
    """

    folder: Path
    environment: Mapping[str, str]
    settings: Settings
    processes: Processes

    @property
    def run_log(self) -> Path:
        """The log of `dispatcher run` and its workers: a JSON object per line."""
        return self.folder / "log" / f"{RUN}.log"

    @property
    def ledger(self) -> Path:
        """The SMTP server's ledger."""
        return self.folder / SMTP / "ledger.jsonl"

    @property
    def wire(self) -> Path:
        """What the SMTP server saw of every connection."""
        return self.folder / SMTP / "wire.jsonl"

    def initialise(self) -> list[str]:
        """Runs `dispatcher init`; returns what it says.

        Raises:
            DispatcherError: it failed.
        """
        finished = subprocess.run(
            _program("init"), env=self.environment, capture_output=True, text=True, errors="replace", check=False
        )
        if finished.returncode != 0:
            words = last_lines(finished.stderr, 4)
            raise DispatcherError(f"`dispatcher init` ended with exit code {finished.returncode}: {words}")
        return finished.stdout.splitlines()

    def start_run(self) -> None:
        """Starts `dispatcher run`, and waits until each of its workers consumes.

        Raises:
            ServerUnavailable: it ended, or took too long; with the end of its log.
        """
        self.processes.launch(RUN, _plan(self.folder, RUN, _program("run"), self.environment, ["SIGTERM"]))
        await_condition(
            lambda: self._consuming_workers() >= self.settings.workers,
            seconds=READY_SECONDS,
            broken=self.obituary,
            what="`dispatcher run`",
            log=self.run_log,
        )

    def kill_worker(self) -> int | None:
        """Kills one of the run's workers with SIGKILL; returns its pid, or None while there is none."""
        workers = [pid for pid in keeper.descendants(self._run_pid() or 0) if _title(pid).startswith(_WORKER_TITLE)]
        if not workers:
            return None
        os.kill(workers[0], signal.SIGKILL)
        return workers[0]

    def stop_run(self) -> int | None:
        """Asks the run to drain; returns its exit code, or None if it did not end in time.

        Harmless where it has ended by itself.
        """
        if pid := self._run_pid():
            keeper.send(pid, signal.SIGTERM)
        with suppress(ServerUnavailable):
            await_condition(
                lambda: self._exit_code() is not None,
                seconds=STOP_SECONDS,
                broken=lambda: None,
                what="the end of the run",
            )
        return self._exit_code()

    def obituary(self) -> str | None:
        """How the run ended, with the end of its log; None while it lives."""
        return self.processes.obituary(RUN)

    def events(self) -> list[Mapping[str, Any]]:
        """What the run's log says so far; lines that are no event (a stack trace) are passed over."""
        return read_events(self.run_log)

    def last_words(self) -> str:
        """The end of the run's log, without the attempts."""
        lines = self.run_log.read_text(errors="replace").splitlines() if self.run_log.exists() else []
        notable = [line for line in lines if '"email.attempted"' not in line]
        return "\n".join([f"the end of {self.run_log}, without the attempts:", *notable[-_LAST_LINES:]])

    def _consuming_workers(self) -> int:
        connected = [event for event in self.events() if event["event"] == "broker.connected" and "queue" in event]
        return len({event["worker"] for event in connected})

    def _run_pid(self) -> int | None:
        return self.processes.running().get(RUN)

    def _exit_code(self) -> int | None:
        record = self.processes.record()
        return record["exited"].get(RUN) if record else None


@contextmanager
def set_stage(folder: Path, *, workers: int, progress: Progress) -> Iterator[Stage]:
    """A stage with servers and a local SMTP server, and without `dispatcher run`; at the end no process is left.

    Raises:
        ServerUnavailable: something did not start.
        DispatcherError: the folder is in use, or holds what no demo made.
    """
    folder = folder.absolute()
    with own_folder(folder), demo_servers(folder / "servers", progress) as names:
        processes = Processes(folder)
        processes.spawn_keeper(os.getpid())
        try:
            port = _start_smtp(processes)
            progress(f"a local SMTP server listens on port {port} and keeps a ledger")
            ours = {
                "DISPATCHER_DATABASE_SCHEMA": schema(),  # this process reads the same tables
                "DISPATCHER_SMTP_URL": f"smtp://127.0.0.1:{port}?tls=none",
                "DISPATCHER_RUN_DIR": str(folder / RUN),
            }
            environment = _foreign_environment() | names | SETTINGS | ours | {"DISPATCHER_WORKERS": str(workers)}
            yield Stage(folder, environment, load(environment), processes)
        finally:
            processes.stop()


def _foreign_environment() -> dict[str, str]:
    """The environment without any of our settings: a demo is not to work by a host's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def _start_smtp(processes: Processes) -> int:
    """The port of a local SMTP server that keeps a ledger."""
    words = ["--folder", str(processes.folder / SMTP), "--latency-ms", str(SMTP_LATENCY_MS), "--wire"]
    argv = [sys.executable, "-m", "dispatcher.dev.smtp_sink", *words]
    plan = _plan(processes.folder, SMTP, argv, _foreign_environment(), ["SIGTERM"])
    processes.launch(SMTP, plan)
    log = Path(plan["log"])
    await_condition(
        lambda: bool(read_events(log)),
        seconds=READY_SECONDS,
        broken=lambda: processes.obituary(SMTP),
        what="the local SMTP server",
        log=log,
    )
    return int(read_events(log)[0]["port"])


def read_events(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a file that are whole JSON objects; none where there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [orjson.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]


def _program(command: str) -> list[str]:
    return [sys.executable, "-m", "dispatcher.cli.main", command]


def _plan(folder: Path, name: str, argv: Sequence[str], environment: Mapping[str, str], stop: list[str]) -> Plan:
    log = str(folder / "log" / f"{name}.log")
    # SIGTERM, so that a run drains and reaps even then; the SMTP server ends by it at once.
    return Plan(argv=list(argv), env=dict(environment), cwd=str(folder), log=log, stop=stop, orphaned="SIGTERM")


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
