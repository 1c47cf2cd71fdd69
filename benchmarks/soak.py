"""Measures an hour of steady work: `python benchmarks/soak.py --minutes 60 --rate 40 --provider sendgrid --out DIR`.

Emails arrive at a steady rate, in an open loop, while memory, file descriptors, threads, tables, latency and queues are
sampled. At the end the program fits a robust line to each series, and gives a verdict: flat, or the growth per hour.
The line uses the second half of the run, because memory first grows to the size of the working set. For latency, the
line uses all samples except the first tenth. Every email is tagged as a one-time code, so its content is deleted within
a minute after it was sent. The run thus shows whether tables grow although their rows are deleted. Tables that keep a
row per email are judged by their bytes per email. Two yardsticks, a hash and a commit, measure the speed of the machine
itself. They show whether the machine or the product became slower.

The folder gets `samples.jsonl` (one line per sample), `verdict.json` and `soak.png` (with the extra `bench`). Ctrl-C
ends the run early, with a verdict on the samples so far. Exit code 1: a series grows, or an email is lost, duplicated,
held, failed or unfinished.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/soak.py`

from benchmarks import soak_report as report
from benchmarks.doubles import PROVIDERS
from benchmarks.machine import machine
from benchmarks.rig import Case, Stage, stage
from benchmarks.soak_report import Sample, SoakBooks
from benchmarks.steady import Arrivals
from benchmarks.vitals import (
    email_vitals,
    latency_vitals,
    members,
    process_vitals,
    queue_vitals,
    table_vitals,
    yardsticks,
)
from dispatcher.broker.management import Management
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected
from dispatcher.store.figures import count_emails

DOUBLE_WRITES_SECONDS = 1.0
"""Within this time, the provider's double has written all acceptances to its ledger."""
FINISH_SECONDS = 90.0
"""The time limit for the last emails after the arrivals have ended."""


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "facts.json").write_text(json.dumps(facts := _facts(options)) + "\n")
    samples, books = _soak(options, folder, stop, console)
    trends = report.trends(samples)
    verdict = {**facts, "books": asdict(books), "trends": [asdict(each) for each in trends]}
    (folder / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n")
    report.plot(samples, facts, folder / "soak.png", console)
    if options.json:
        sys.stdout.write(json.dumps(verdict) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(report.table(trends), report.summary(samples, books))
    if not books.balance or report.growing(trends):
        sys.exit(1)


def _soak(
    options: argparse.Namespace, folder: Path, stop: threading.Event, console: Console
) -> tuple[list[Sample], SoakBooks]:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dispatcher-soak-")))
        servers = stack.enter_context(private_servers(scratch / "servers", progress=console.log))
        scene = stack.enter_context(stage(servers, Case(options.provider, options.workers, 0), scratch / "case"))
        stack.enter_context(scene.running("run", {"DISPATCHER_METRICS_ADDRESS": "127.0.0.1:0"}))
        arrivals = Arrivals(scene.database_url, options.rate, burst=options.burst, tags=["one_time_code"])
        with arrivals.running():
            console.log(f"emails arrive at {options.rate:g}/s for {options.minutes:g} minutes; Ctrl-C ends it early")
            samples = _watch(scene, servers, arrivals, options, folder, stop, console)
        unfinished = _await_the_last(scene.database_url)
        time.sleep(DOUBLE_WRITES_SECONDS)
        return samples, _books(scene, arrivals, unfinished)


def _watch(
    scene: Stage,
    servers: Servers,
    arrivals: Arrivals,
    options: argparse.Namespace,
    folder: Path,
    stop: threading.Event,
    console: Console,
) -> list[Sample]:
    management = Management(servers.management_url)
    queues = {"send": scene.environment["DISPATCHER_QUEUE"], "dlq": scene.environment["DISPATCHER_DLQ"]}
    samples: list[Sample] = []
    began_at = seen_at = time.time()
    with (folder / "samples.jsonl").open("w") as lines, connected(scene.database_url, name="soak") as connection:
        while not stop.wait(options.every) and time.time() - began_at < options.minutes * 60:
            now = time.time()
            sample = {
                "at": now - began_at,
                "load": os.getloadavg()[0],
                "enqueued": float(len(arrivals.ids)),
                "lateness.worst_ms": arrivals.worst_lateness_seconds * 1000,
                **yardsticks(connection),
                **table_vitals(connection),
                **email_vitals(connection),
                # Leave out the last second, because emails are recorded some milliseconds after they were accepted.
                **latency_vitals(connection, seen_at - 1, now - 1),
                **queue_vitals(management, queues),
            }
            for member in members(os.getpid()):
                sample |= process_vitals(member)
            arrivals.worst_lateness_seconds, seen_at = 0.0, now
            samples.append(sample)
            lines.write(json.dumps(sample) + "\n")
            lines.flush()
            if arrivals.fault is not None:
                raise RuntimeError("enqueueing failed") from arrivals.fault
            if len(samples) % max(1, round(60 / options.every)) == 0:
                console.log(report.progress(sample))
    return samples


def _await_the_last(database_url: str) -> int:
    """Wait until no email is pending or sending, or until the time limit. Returns the number of emails that are still
    pending or sending."""
    deadline = time.monotonic() + FINISH_SECONDS
    with connected(database_url) as connection:
        while True:
            counts = count_emails.sync(connection)
            unfinished = sum(count for status, count in counts.items() if status in ("pending", "sending"))
            if not unfinished or time.monotonic() > deadline:
                return unfinished
            time.sleep(0.2)


def _books(scene: Stage, arrivals: Arrivals, unfinished: int) -> SoakBooks:
    acceptances = scene.double.acceptances()
    with connected(scene.database_url) as connection:
        statuses: dict[str, str] = {
            str(email_id): status
            for email_id, status in connection.execute("select email_id, status from dispatcher.email_log")
        }
    sent = {email_id for email_id, status in statuses.items() if status == "sent"}
    counts = Counter(statuses.values())
    return SoakBooks(
        enqueued=len(arrivals.ids),
        sent=len(sent),
        failed=counts["failed"],
        held=counts["held"],
        unfinished=unfinished,
        lost=len(sent - acceptances.keys()) + len({str(each) for each in arrivals.ids} - set(statuses)),
        duplicates=sum(len(instants) - 1 for instants in acceptances.values()),
    )


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    asked = {name: getattr(options, name) for name in ("minutes", "rate", "burst", "workers", "provider", "every")}
    return {**machine(), **asked, "began_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/soak.py", description=summary, epilog=details)
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="default: 60")
    parser.add_argument("--rate", type=float, default=40.0, metavar="R", help="emails per second; default: 40")
    parser.add_argument("--burst", type=int, default=1, metavar="N", help="emails that arrive together; default: 1")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--provider", choices=PROVIDERS, default="sendgrid")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between samples; default: 10")
    parser.add_argument("--out", type=Path, default=Path("soak"), metavar="DIR", help="default: ./soak")
    parser.add_argument("--json", action="store_true", help="print the verdict as one line of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
