"""Processes that write metrics, and scrapes of their files. Each process executes and answers the test's commands, and
exits when the pipe closes.

They are forked from one server, which has loaded the code: a new Python would take a second of CPU for each.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest

from dispatcher.telemetry import log, metric_files, metrics
from dispatcher.telemetry.scrape import ProcessCollector

SENT: Final = 'dispatcher_emails_total{outcome="accepted",provider="smtp"}'
EXPIRED: Final = 'dispatcher_cancelled_emails_total{reason="expired"}'
IN_FLIGHT: Final = "dispatcher_in_flight_emails"
_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


class Process:
    def __init__(self, process: ForkServerProcess, pipe: Connection[Any, Any]) -> None:
        self._process = process
        self._pipe = pipe

    def tell(self, words: str) -> str:
        self._pipe.send(words)
        return str(self._pipe.recv())

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def counting(folder: Path, slot: str = "w0", *, file_octets: int | None = None) -> Iterator[Process]:
    """Runs a process that writes metrics during the block. Beyond `file_octets`, writing fails, as on a full disk."""
    ours, theirs = _FORKS.Pipe()
    process = _FORKS.Process(target=_serve, args=(theirs, folder, slot, file_octets))
    process.start()
    theirs.close()
    with ours:
        assert ours.recv() == "ready"
        yield Process(process, ours)
    process.join()


def _serve(pipe: Connection[Any, Any], folder: Path, slot: str, file_octets: int | None) -> None:
    log.configure("info", "json", sys.stderr)
    if file_octets is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_octets, file_octets))
    metric_files.begin(folder, slot)
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            word, _, amount = pipe.recv().partition(" ")
            match word:
                case "add":
                    metrics.EMAILS.add(float(amount), "smtp", "accepted")
                case "observe":
                    metrics.SEND_SECONDS.observe(float(amount), "smtp")
                case "observe-all":
                    metrics.SEND_SECONDS.observe_all(map(float, amount.split()), "smtp")
                case "label":
                    metrics.THROTTLES.add(1, f"provider-{amount}")
                case "breaker":
                    metrics.BREAKERS.set(1, *amount.split())
                case "set":
                    metrics.IN_FLIGHT.set(float(amount))
                case "race":
                    _race(int(amount))
            pipe.send("counts" if metrics.EMAILS.is_bound else "silent")


def _race(labels: int) -> None:
    def count(thread: int) -> None:
        for number in range(labels):
            metrics.THROTTLES.add(1, f"provider-{thread}-{number}")

    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def samples(folder: Path) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(ProcessCollector(folder))
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def skipped(folder: Path) -> dict[str, float]:
    prefix = 'dispatcher_metrics_skipped_files{reason="'
    found = {name: value for name, value in samples(folder).items() if name.startswith(prefix)}
    assert len(found) == 4
    return {name.removeprefix(prefix).removesuffix('"}'): value for name, value in found.items() if value}
