"""Measures the CPU cost of metrics without the rest of the chain: `python benchmarks/metrics_alone.py`, on any machine.

The program updates a worker's counters for a batch of emails, in real files, and renders the page for a scrape from
these files. The result is the lowest CPU time of many runs. The paired runs of `benchmarks/metrics.py` measure the same
cost in the whole chain, and need a machine without other work.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/metrics_alone.py`

from dispatcher.domain.status import Status
from dispatcher.telemetry import metric_files, metrics, scrape
from dispatcher.worker.in_flight_email import EndedAttempt
from dispatcher.worker.report import report_record

BATCHES: Final = (1, 8, 64, 256)
ROUNDS: Final = 30
EMAILS_PER_ROUND: Final = 4096
SLOTS: Final = 4


def main() -> None:
    """The command line, whose only option is --help."""
    argparse.ArgumentParser(prog="benchmarks/metrics_alone.py", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatcher-benchmark-") as name:
        folder = Path(name)
        metric_files.begin(folder, "w0")
        for size in BATCHES:
            batch = _batch(size)
            times = EMAILS_PER_ROUND // size
            seconds = _least_seconds(lambda batch=batch, times=times: _count(batch, times))  # type: ignore[misc]
            print(f"counting, batch size {size:3}: {seconds * 1e6 / EMAILS_PER_ROUND:5.2f} us of CPU per email")
        for path in folder.glob("*_w0.*"):
            for slot in range(1, SLOTS):
                shutil.copy(path, path.with_name(path.name.replace("_w0.", f"_w{slot}.")))
        seconds = _least_seconds(lambda: scrape.page(folder))
        print(f"a scrape, {SLOTS} workers: {seconds * 1e3:.1f} ms of CPU")
        metric_files.end()


def _count(batch: Any, times: int) -> None:
    for _ in range(times):
        metrics.LEASE_EMAILS.observe(len(batch))
        metrics.LEASE_SECONDS.observe(0.003)
        report_record(batch, 0.003)


def _batch(size: int) -> list[Any]:
    """The parts of a worker's recorded results that the metrics count."""
    now = datetime.now(UTC)
    email = SimpleNamespace(lease=SimpleNamespace(due_since=now - timedelta(seconds=1)))
    return [
        EndedAttempt(
            email,  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                provider="sendgrid",
                outcome="accepted",
                error_type=None,
                status=Status.SENT,
                started_at=now,
                finished_at=now + timedelta(milliseconds=5 + number % 40),
            ),
            0.0,
        )
        for number in range(size)
    ]


def _least_seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    return min(once() for _ in range(ROUNDS))


if __name__ == "__main__":
    main()
