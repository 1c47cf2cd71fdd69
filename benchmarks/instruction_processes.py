"""Counts the instructions of commands, and of the processes of a `dispatcher run`: a start, an idle second, a scrape.

The processes of `dispatcher run` mark the ends of these parts at a signal (see `instruction_run.py`). Under callgrind,
they are fifty times as slow, but their timers are not. A process that is busy for more than a fiftieth of an idle
second therefore does less than without callgrind.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from benchmarks.callgrind import NotCounted, callgrind, python_of, total_of
from benchmarks.cpu import children_of
from dispatcher.dev import ports
from dispatcher.dev.servers import Servers

RUNNER: Final = Path(__file__).resolve().parent / "instruction_run.py"
COMMANDS: Final = {
    "--help": ("--help",),
    "find": ("find", "--to", "ann@example.org"),
    "show": ("show", "receipt-1"),
    "status": ("status",),
}
ENQUEUE: Final = ("enqueue", "--key", "receipt-1", "--from", "shop@example.com", "--to", "ann@example.org")
CONTENT: Final = ("--subject", "Your receipt", "--text", "Thank you for your order.")
READY_SECONDS: Final = 300.0
UP: Final = {"relay": "relay.leading", "worker": "broker.connected", "monitor": "http.listening"}
"""For each role, the event in the log after which the process does its work."""
ATTEMPTS: Final = 5
SETTLE_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 60.0
SCRAPES: Final = 10
START: Final = "start of `run`"
SCRAPE: Final = "scrape"


@dataclass(frozen=True, slots=True)
class Installation:
    """A checkout with its own database and queues."""

    tree: Path
    folder: Path
    environment: dict[str, str]

    def words(self, *arguments: str) -> list[str]:
        return [str(python_of(self.tree)), "-P", "-m", "dispatcher", *arguments]

    def run(self, *words: str) -> None:
        """Runs a command. Raises NotCounted if it fails."""
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotCounted(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


@contextmanager
def installed(tree: Path, folder: Path, servers: Servers) -> Iterator[Installation]:
    """Creates tables and queues with the checkout's own `init`; drops the database afterwards."""
    name = f"count_{secrets.token_hex(4)}"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            installation = Installation(tree, folder, _environment(servers, name, folder))
            installation.run(*installation.words("init"))
            yield installation
        finally:
            administration.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@dataclass(slots=True)
class Host:
    """A `dispatcher run` under callgrind."""

    pid: int
    port: int
    folder: Path
    children: list[int]
    up_at: Mapping[str, datetime]
    marks: int = 0

    def mark(self, work: Callable[[], object] = lambda: None) -> float:
        """Does some work and ends the count of a part in all processes; returns the seconds that the part took."""
        began = time.monotonic()
        work()
        seconds = time.monotonic() - began
        self.marks += 1
        for pid in self.children:
            os.kill(pid, signal.SIGUSR2)
        for pid in self.children:
            marked = self.folder / f"{pid}.{self.marks}"
            _wait_until(marked.exists, f"process {pid} did not mark the end of a part")
        return seconds

    def counts(self, part: int) -> dict[str, float]:
        """The instructions of each role between the marks `part - 1` and `part`; part 1 begins at the fork."""
        return {(self.folder / f"{pid}.{part}").read_text(): float(self._counts(pid)[part]) for pid in self.children}

    def until_forks(self) -> float:
        """The instructions of the parent process until its last fork."""
        return sum(self._counts(self.pid))

    def _counts(self, pid: int) -> list[int]:
        """A child's first count ends at its fork."""
        files = self.folder.glob(f"run.{pid}.[0-9]*")
        return [total_of(each) for each in sorted(files, key=lambda file: int(file.suffix[1:]))]


def count_commands(installation: Installation) -> dict[str, float]:
    """The instructions of each command, from its start to its exit."""
    installation.run(*installation.words(*ENQUEUE, *CONTENT))
    counted: dict[str, float] = {}
    for number, (name, arguments) in enumerate(COMMANDS.items()):
        words = installation.words(*arguments)
        installation.run(*words)  # a first call may write bytecode files
        counted[f"command {name}"] = _count_command(installation, f"command{number}", words)
    return counted


def _count_command(installation: Installation, file: str, words: list[str]) -> float:
    """Counts a command. On a busy machine, a command under callgrind may need longer to connect than it waits, so a
    failure is repeated."""
    for attempt in range(ATTEMPTS):
        name = f"{file}-{attempt}"
        try:
            installation.run(*callgrind(installation.folder, name, "ctermid"), *words)
        except NotCounted:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return sum(map(total_of, installation.folder.glob(f"{name}.[0-9]*")))
    raise AssertionError("unreachable")


def count_run(installation: Installation) -> dict[str, float]:
    """The instructions of a start of `dispatcher run` with one worker, of idle seconds by role, and of a scrape."""
    with _running(installation) as host:
        host.mark()
        waited = {role: (datetime.now(UTC) - at).total_seconds() for role, at in host.up_at.items()}
        time.sleep(SETTLE_SECONDS)
        host.mark()
        idle_seconds = host.mark(lambda: time.sleep(IDLE_SECONDS))
        scraped_seconds = host.mark(lambda: [_get(host.port, "metrics") for _ in range(SCRAPES)])
    per_second = {role: count / idle_seconds for role, count in host.counts(3).items()}
    scraped = host.counts(4)["monitor"] - per_second["monitor"] * scraped_seconds
    return {
        # A process that is up waits for the others, and is idle meanwhile.
        START: host.until_forks() + sum(n - per_second[role] * waited[role] for role, n in host.counts(1).items()),
        **{f"idle second, {role}": count for role, count in sorted(per_second.items())},
        SCRAPE: scraped / SCRAPES,
    }


COUNTS: Final[Mapping[str, Callable[[Installation], dict[str, float]]]] = {"commands": count_commands, "run": count_run}
"""By the name of the group of counts."""


@contextmanager
def _running(installation: Installation) -> Iterator[Host]:
    """A `dispatcher run` that is ready."""
    folder, (port,) = installation.folder, ports.choose(1)
    environment = {**installation.environment, "DISPATCHER_METRICS_ADDRESS": f"127.0.0.1:{port}"}
    program = [str(python_of(installation.tree)), "-P", str(RUNNER), str(folder), "run"]
    log = folder / "run.txt"
    with log.open("wb") as output:
        words = [*callgrind(folder, "run", "ctermid"), *program]
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        _wait_until(lambda: process.poll() is not None or len(_up_at(log)) == len(UP), "`dispatcher run` was not ready")
        if process.poll() is not None:
            raise NotCounted(f"`dispatcher run` ended with {process.returncode}:\n{log.read_text(errors='replace')}")
        yield Host(process.pid, port, folder, children_of(process.pid), _up_at(log))
    finally:
        process.terminate()
        process.wait()


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise NotCounted(f"{otherwise} within {READY_SECONDS:.0f} s")
        time.sleep(0.2)


def _up_at(log: Path) -> dict[str, datetime]:
    """When each role was up. (/readyz would fail, because it expects faster answers.)"""
    lines = [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.endswith("}")]
    return {
        role: datetime.fromisoformat(line["timestamp"])
        for role, event in UP.items()
        for line in lines
        if line["event"] == event
    }


def _get(port: int, page: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=READY_SECONDS) as answer:
        return bytes(answer.read())


def _environment(servers: Servers, database: str, folder: Path) -> dict[str, str]:
    """The settings of one worker that sends through SendGrid. Nothing listens at this address of SendGrid."""
    return {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "DISPATCHER_DATABASE_URL": urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{database}")),
        "DISPATCHER_AMQP_URL": servers.amqp_url,
        "DISPATCHER_RABBITMQ_MANAGEMENT_URL": servers.management_url,
        "DISPATCHER_EXCHANGE": database,
        "DISPATCHER_QUEUE": f"{database}.send",
        "DISPATCHER_DLQ": f"{database}.dlq",
        "DISPATCHER_PROVIDERS": "sendgrid",
        "SENDGRID_API_KEY": "SG.counted",
        "DISPATCHER_SENDGRID_HOST": "http://127.0.0.1:9",
        "DISPATCHER_WORKERS": "1",
        "DISPATCHER_HANG_SECONDS": "0",
        "DISPATCHER_RUN_DIR": str(folder / "host"),
        "DISPATCHER_LOG_FORMAT": "json",
        "DISPATCHER_METRICS_ADDRESS": "off",
    }
