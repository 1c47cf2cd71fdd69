"""Measures a worker's peak memory, and the latency of small emails, during a burst of large attachments.

    python benchmarks/large_emails.py                                            200 emails of 20 MiB, 5,000 small ones
    python benchmarks/large_emails.py --provider smtp
    python benchmarks/large_emails.py --large 30 --small 100 --address-space-mb 1500

`dispatcher run` and private PostgreSQL and RabbitMQ servers are real. The provider's double reads every octet and keeps
a ledger. Large emails are enqueued one after the other, as fast as PostgreSQL accepts them. Small emails arrive at a
constant rate. A small email's latency is the time from the end of its commit to the provider's acceptance. The same
clock measures both times. A worker's peak is the kernel's VmHWM, read for every process that was a worker. If there are
more such processes than workers, some workers died.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from psycopg import Connection
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/large_emails.py`

from benchmarks.books import read_books
from benchmarks.cpu import pids_of_role
from benchmarks.machine import machine
from benchmarks.rig import Case, bare_stage, database, drafts, wait_until
from benchmarks.run import FAILED, INTERRUPTED, terminated
from dispatcher import Attachment, Email, enqueue
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected

MIB: Final = 1024 * 1024
LOOK_SECONDS: Final = 0.2
PEAK_MB: Final = 400
P99_SECONDS: Final = 5.0
START_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run.

    Attributes:
        peaks_mb: The peak of each process that was a worker, in MB.
        p50_seconds: The median latency of small emails, from commit to acceptance.
        seconds: From the first commit until the last email is recorded.
    """

    provider: str
    large: int
    large_mib: float
    small: int
    workers: int
    peaks_mb: tuple[float, ...]
    p50_seconds: float
    p99_seconds: float
    slowest_seconds: float
    seconds: float
    sent: int
    failed: int
    held: int
    lost: int
    duplicates: int

    @property
    def is_good(self) -> bool:
        """Whether no email was lost or duplicated, and memory and latency are within their bounds."""
        balance = self.sent == self.large + self.small and not (self.lost or self.duplicates)
        return balance and max(self.peaks_mb) < PEAK_MB and self.p99_seconds < P99_SECONDS


class Peaks:
    """The peak resident memory of each worker."""

    def __init__(self, run_pid: int) -> None:
        self.by_pid: dict[int, float] = {}
        self._run_pid = run_pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample the workers' memory for the duration of the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            for pid in pids_of_role(self._run_pid, "worker"):
                with suppress(OSError):
                    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
                    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
                    self.by_pid[pid] = max([self.by_pid.get(pid, 0.0), *(int(kib) * 1024 / 1e6 for kib in found)])


class Producers:
    """Two applications, each with its own connection: the first enqueues large emails, the second small emails."""

    def __init__(self, database_url: str, options: argparse.Namespace) -> None:
        self.committed_at: dict[str, float] = {}
        self.large: set[str] = set()
        self._url = database_url
        self._options = options
        self._faults: list[BaseException] = []

    def warm_up(self) -> None:
        """Enqueue an email and wait until it is sent. Then all parts of `dispatcher run` work."""
        with connected(self._url) as connection:
            (first,) = drafts(1, "warm-up")
            enqueue(connection, first)
            wait_until(lambda: _finished(connection) == 1, START_SECONDS)

    def run(self) -> None:
        """Enqueue all emails."""
        threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._all_large, self._all_small)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._faults:
            raise self._faults[0]

    def _guarded(self, work: object) -> None:
        try:
            assert callable(work)
            work()
        except BaseException as fault:  # noqa: BLE001 - raised again by `run`
            self._faults.append(fault)

    def _all_large(self) -> None:
        content = os.urandom(int(self._options.mib * MIB))
        with connected(self._url) as connection:
            for number in range(self._options.large):
                email = Email(
                    message_key=f"large-{number}",
                    sender="Shop <shop@example.com>",
                    to=f"large{number}@example.org",
                    subject=f"Your photographs {number}",
                    text="They are attached.",
                    attachments=[Attachment("photographs.bin", "application/octet-stream", content)],
                )
                self.large.add(str(enqueue(connection, email).email_id))

    def _all_small(self) -> None:
        with connected(self._url) as connection:
            began = time.monotonic()
            for number, email in enumerate(drafts(self._options.small)):
                time.sleep(max(0.0, began + number / self._options.rate - time.monotonic()))
                email_id = str(enqueue(connection, email).email_id)
                self.committed_at[email_id] = time.time()


def measure(servers: Servers, folder: Path, options: argparse.Namespace) -> Outcome:
    """One run.

    Raises:
        RuntimeError: The run did not finish in time, or `dispatcher run` failed.
    """
    case = Case(options.provider, options.workers, options.large + options.small)
    with database(servers) as database_url, bare_stage(servers, case, folder, database_url) as scene:
        producers = Producers(database_url, options)
        settings = {"DISPATCHER_SEND_TIMEOUT_SECONDS": "120"}
        if options.memory_mb:
            settings["DISPATCHER_WORKER_MEMORY_MB"] = str(options.memory_mb)
        with scene.running("run", settings) as run_pid:
            if options.address_space_mb:
                octets = options.address_space_mb * 1_000_000
                resource.prlimit(run_pid, resource.RLIMIT_AS, (octets, octets))
            peaks = Peaks(run_pid)
            with peaks.watching():
                producers.warm_up()
                began_at = time.time()
                producers.run()
                with connected(database_url) as connection:
                    wait_until(lambda: _finished(connection) > case.emails, options.patience_seconds)
        accepted = scene.double.acceptances()
        with connected(database_url) as connection:
            email_ids = producers.large | producers.committed_at.keys()
            books = read_books(connection, email_ids, {i: accepted[i] for i in accepted.keys() & email_ids})
    times = sorted(accepted[i][0] - at for i, at in producers.committed_at.items() if i in accepted)
    return Outcome(
        provider=options.provider,
        large=options.large,
        large_mib=options.mib,
        small=options.small,
        workers=options.workers,
        peaks_mb=tuple(peaks.by_pid.values()),
        p50_seconds=statistics.median(times),
        p99_seconds=times[int(len(times) * 0.99)],
        slowest_seconds=times[-1],
        seconds=books.last_sent_at - began_at,
        sent=books.sent,
        failed=books.failed,
        held=books.held,
        lost=books.lost or 0,
        duplicates=books.duplicates or 0,
    )


def _finished(connection: Connection[Any]) -> int:
    row = connection.execute(
        "select count(*) from dispatcher.email_log where status in ('sent', 'failed', 'held')"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _table(outcome: Outcome) -> Table:
    table = Table(
        "what", "figure", title=f"{outcome.large} emails of {outcome.large_mib:g} MiB over {outcome.provider}"
    )
    peaks = ", ".join(f"{peak:.0f} MB" for peak in outcome.peaks_mb)
    table.add_row(f"peak of each worker process (limit {PEAK_MB} MB)", peaks)
    times = (outcome.p50_seconds, outcome.p99_seconds, outcome.slowest_seconds)
    words = ", ".join(f"{seconds:.2f} s" for seconds in times)
    table.add_row(f"{outcome.small} small ones: p50, p99 (bound {P99_SECONDS:g} s), slowest", words)
    table.add_row("time until all are finished", f"{outcome.seconds:.0f} s")
    table.add_row("sent, failed, held", f"{outcome.sent}, {outcome.failed}, {outcome.held}")
    table.add_row("lost, duplicates", f"{outcome.lost}, {outcome.duplicates}")
    return table


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks/large_emails.py",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--provider", choices=["sendgrid", "ses", "smtp"], default="sendgrid")
    parser.add_argument("--large", type=int, default=200, help="how many large emails (200)")
    parser.add_argument("--mib", type=float, default=20.0, help="the attachment of each large email, in MiB (20)")
    parser.add_argument("--small", type=int, default=5000, help="how many small emails (5000)")
    parser.add_argument("--rate", type=float, default=100.0, help="small emails per second (100)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-mb", type=int, help="DISPATCHER_WORKER_MEMORY_MB; default: the product's")
    parser.add_argument(
        "--address-space-mb", type=int, help="limit for each process of `dispatcher run`; default: none"
    )
    parser.add_argument("--patience-seconds", type=float, default=600.0, help="time limit after the last commit (600)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if emails are missing or a bound is exceeded."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, terminated)
    console = Console(stderr=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
            private_servers(Path(folder) / "servers", progress=console.log) as servers,
        ):
            outcome = measure(servers, Path(folder) / "case", options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except RuntimeError as error:
        console.print(str(error), style="red")
        return FAILED
    if options.json:
        sys.stdout.write(json.dumps({**asdict(outcome), **machine()}) + "\n")
    else:
        Console().print(_table(outcome))
    return 0 if outcome.is_good else FAILED


if __name__ == "__main__":
    sys.exit(main())
