"""Measures one case of `run.py`: the throughput of a warmed-up `dispatcher run`, and the cost of each part.

Without a rate, the case is a backlog: all emails are inserted in one transaction. The clock starts after the commit, so
publishing is measured and enqueueing is not. The clock stops when the last email is recorded. With a rate, the case is
an open loop: emails arrive by a schedule (see `open_loop`), and each email's clock starts at its scheduled arrival. The
times of acceptance come from the double's ledger, by this machine's clock.
"""

from __future__ import annotations

import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks import cpu
from benchmarks.books import Books, read_books
from benchmarks.double import WRITE_SECONDS
from benchmarks.faults import killing
from benchmarks.figures import PERCENTILES, latencies_ms, per_email_us, percentile
from benchmarks.open_loop import read_arrivals
from benchmarks.page import Page, mean_of
from benchmarks.rig import STALL_SECONDS, Case, Stage, bare_stage, drafts
from benchmarks.statements import Work, WorkMeter
from dispatcher import enqueue_many
from dispatcher.config import load
from dispatcher.dev import ports
from dispatcher.dev.servers import Servers, status
from dispatcher.store.connections import connected

WARM_UP_EMAILS: Final = 1000
"""The number of warm-up emails per worker; never more than the measured emails."""
SAMPLE_SECONDS: Final = 0.5
BUSY_DOUBLE: Final = 0.85
"""If the double uses at least this share of one core, its single process may be the bottleneck."""

_Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of a case.

    Attributes:
        seconds: From the commit of the backlog (in an open loop: from the first arrival) until the last outcome is
            recorded.
        latency_ms: Percentiles of the time until the provider accepts an email. The time starts at the commit of the
            backlog; in an open loop, at the scheduled arrival of the email.
        from_commit_ms: The same percentiles, but the time starts at the commit of the email; only in an open loop.
        cpu_us: CPU microseconds per email, by process; `machine` is the total of all processes.
        pss_mb: The memory at the end, in MB; the median of the workers.
        in_flight_share: The share of the prefetch windows that was leased while there was a backlog; the median of the
            samples.
        double_busy: The share of one core that the provider's double used.
        kills: How many workers were killed during the case.
    """

    case: Case
    emails_per_second: float
    seconds: float
    latency_ms: Mapping[str, float]
    from_commit_ms: Mapping[str, float]
    cpu_us: Mapping[str, float]
    pss_mb: float | None
    lease_batch: float | None
    record_batch: float | None
    in_flight_share: float | None
    work: Work
    double_busy: float | None
    kills: int
    books: Books


@dataclass(frozen=True, slots=True)
class Batch:
    """The enqueued emails.

    Attributes:
        began_at: When each email's clock started, by id, in Unix seconds.
        committed_at: When each email's commit was done, by id, in Unix seconds.
    """

    began_at: Mapping[str, float]
    committed_at: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Enqueueing:
    """The enqueueing of a case, which may be in progress.

    Attributes:
        is_over: Whether all emails are enqueued.
        batch: Returns the emails once all are enqueued.
    """

    is_over: Callable[[], bool]
    batch: Callable[[], Batch]


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of all meters at one instant."""

    instant: float
    cpu: Mapping[str, float]
    page: Mapping[str, float]


class MeasuredRun:
    """A `dispatcher run` that is being measured."""

    def __init__(self, servers: Servers, scene: Stage, run_pid: int, page: Page, connection: _Connection) -> None:
        self.scene = scene
        self.run_pid = run_pid
        self.connection = connection
        self._page = page
        self._roots = {"run": run_pid, **server_pids(servers)}
        if scene.double.pid is not None:
            self._roots["double"] = scene.double.pid
        self.window = load(scene.environment).prefetch * scene.case.workers
        self.in_flight_samples: list[float] = []

    def read(self) -> Reading:
        """Read all meters."""
        return Reading(time.time(), cpu.read_cpu(self._roots), self._page.read())

    def await_finished(self, began: Reading, emails: int, enqueueing: Enqueueing) -> None:
        """Wait until this many emails are finished, in any status.

        Args:
            enqueueing: Until the enqueueing is over, an empty backlog does not count as finished.

        Raises:
            RuntimeError: There was no progress for half a minute.
        """
        best, moved_at, rate = 0.0, time.monotonic(), 0.0
        while True:
            left = emails - best
            time.sleep(min(SAMPLE_SECONDS, max(0.05, left / rate)) if rate else SAMPLE_SECONDS)
            page = self._page.read()
            done = page["dispatcher_emails_total"] - began.page.get("dispatcher_emails_total", 0.0)
            if left > 2 * self.window:
                self.in_flight_samples.append(page["dispatcher_in_flight_emails"] / self.window)
            if done > best:
                best, moved_at = done, time.monotonic()
                rate = done / (time.time() - began.instant)
            idle_seconds = time.monotonic() - moved_at
            may_be_over = (done >= emails or idle_seconds > 1) and enqueueing.is_over()
            if may_be_over and not _unfinished(self.connection):
                return
            if idle_seconds > STALL_SECONDS:
                raise RuntimeError(f"no progress for {STALL_SECONDS:.0f} s: {done:.0f} of {emails} emails are finished")


def measure(servers: Servers, case: Case, folder: Path, database_url: str) -> Figures:
    """Run one case on a database that has our tables.

    Raises:
        RuntimeError: There was no progress for half a minute, or the run failed.
    """
    page = Page(ports.choose(1)[0])
    with bare_stage(servers, case, folder, database_url) as scene, connected(database_url) as connection:
        with scene.running("run", page.settings) as run_pid:
            page.await_ready(run_pid)
            _warm_up(connection, case)
            measured_run = MeasuredRun(servers, scene, run_pid, page, connection)
            with keeping_snapshot(database_url, case.hold_seconds):
                measured = _measured(measured_run)
        # The double writes acceptances at intervals. After this time, it has written all of them.
        time.sleep(2 * WRITE_SECONDS)
        return _with_books(measured, scene, connection)


@contextmanager
def keeping_snapshot(database_url: str, seconds: float) -> Iterator[None]:
    """Keep a transaction with a snapshot open and idle for this time, but at most until the block ends."""
    if not seconds:
        yield
        return
    with psycopg.connect(database_url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("set idle_in_transaction_session_timeout = 0")
        connection.execute("select count(*) from dispatcher.email_log where false")
        end = threading.Timer(seconds, connection.rollback)
        end.start()
        try:
            yield
        finally:
            end.cancel()
            end.join()
            connection.rollback()


@dataclass(frozen=True, slots=True)
class _Run:
    """The measurements of one run."""

    batch: Batch
    began: Reading
    ended: Reading
    work: Work
    in_flight_samples: Sequence[float]
    pss_mb: float | None
    kills: int
    clock_ahead: float


def _measured(measured_run: MeasuredRun) -> _Run:
    case = measured_run.scene.case
    enqueueing = _arriving(measured_run) if case.rate else _backlog(measured_run)
    with enqueueing as (enqueued, began, work), killing(measured_run.run_pid, is_on=case.has_faults) as killed:
        measured_run.await_finished(began, case.emails, enqueued)
        ended = measured_run.read()
        done = work.read(case.emails)
        batch = enqueued.batch()
    return _Run(
        batch,
        began,
        ended,
        done,
        tuple(measured_run.in_flight_samples),
        cpu.median_pss_mb(cpu.pids_of_role(measured_run.run_pid, "worker")),
        len(killed),
        _clock_ahead(measured_run.connection),
    )


@contextmanager
def _backlog(measured_run: MeasuredRun) -> Iterator[tuple[Enqueueing, Reading, WorkMeter]]:
    """Enqueue all emails in one transaction. The meters are read just before the commit makes the emails visible."""
    case = measured_run.scene.case
    waiting = drafts(case.emails, f"backlog-{secrets.token_hex(4)}", is_templated=case.is_templated)
    with measured_run.connection.transaction():
        answers = enqueue_many(measured_run.connection, waiting)
        work = WorkMeter(measured_run.connection)
        began = measured_run.read()
    committed_at = time.time()
    at = dict.fromkeys((str(answer.email_id) for answer in answers), committed_at)
    yield Enqueueing(lambda: True, lambda: Batch(at, at)), replace(began, instant=committed_at), work


@contextmanager
def _arriving(measured_run: MeasuredRun) -> Iterator[tuple[Enqueueing, Reading, WorkMeter]]:
    """Enqueue in an open loop, in a separate process."""
    case = measured_run.scene.case
    command = [sys.executable, "-m", "benchmarks.open_loop", "--rate", str(case.rate), "--emails", str(case.emails)]
    command += ["--seed", str(secrets.randbelow(2**31)), *(["--templated"] if case.is_templated else [])]
    work, began = WorkMeter(measured_run.connection), measured_run.read()
    here = Path(__file__).resolve().parent.parent
    output = measured_run.scene.folder / "arrivals.txt"

    def batch() -> Batch:
        process.wait(STALL_SECONDS)
        arrivals = read_arrivals(output.read_text())
        if len(arrivals) != case.emails:
            raise RuntimeError(f"{len(arrivals)} of {case.emails} emails were enqueued")
        return Batch(
            {email_id: scheduled for email_id, (scheduled, _) in arrivals.items()},
            {email_id: committed for email_id, (_, committed) in arrivals.items()},
        )

    with (
        output.open("wb") as file,
        subprocess.Popen(command, stdout=file, cwd=here, env=measured_run.scene.environment) as process,
    ):
        try:
            yield Enqueueing(lambda: process.poll() is not None, batch), began, work
        finally:
            process.terminate()


def _warm_up(connection: _Connection, case: Case) -> None:
    """Send some emails, so that every worker is connected and caches are warm."""
    prefix = f"warm-up-{secrets.token_hex(4)}"
    enqueue_many(
        connection, drafts(min(WARM_UP_EMAILS * case.workers, case.emails), prefix, is_templated=case.is_templated)
    )
    deadline = time.monotonic() + 2 * STALL_SECONDS
    while _unfinished(connection):
        if time.monotonic() > deadline:
            raise RuntimeError("the warm-up's emails were not sent within a minute")
        time.sleep(0.1)


def _with_books(run: _Run, scene: Stage, connection: _Connection) -> Figures:
    case = scene.case
    accepted = scene.double.acceptances() if scene.double.keeps_books else None
    books = read_books(connection, frozenset(run.batch.began_at), accepted)
    first = min(run.batch.began_at.values())
    seconds = books.last_sent_at - run.clock_ahead - first
    used = per_email_us(run.began.cpu, run.ended.cpu, case.emails)
    if run.kills:
        # When the parent waits for a killed worker, the worker's CPU time is added to the parent's.
        used["worker"], used["parent"] = used.get("worker", 0.0) + used.get("parent", 0.0), 0.0
    busy = used["double"] * case.emails / 1e6 / (run.ended.instant - run.began.instant) if "double" in used else None
    return Figures(
        case=case,
        emails_per_second=books.sent / seconds,
        seconds=seconds,
        latency_ms=_percentiles(latencies_ms(run.batch.began_at, accepted or {})),
        from_commit_ms=_percentiles(latencies_ms(run.batch.committed_at, accepted or {})),
        cpu_us=used,
        pss_mb=run.pss_mb,
        lease_batch=mean_of("dispatcher_lease_batch_emails", run.began.page, run.ended.page),
        record_batch=mean_of("dispatcher_record_batch_emails", run.began.page, run.ended.page),
        in_flight_share=statistics.median(run.in_flight_samples) if run.in_flight_samples else None,
        work=run.work,
        double_busy=busy,
        kills=run.kills,
        books=books,
    )


def _percentiles(ordered: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": percentile(ordered, share) for share in PERCENTILES} if ordered else {}


def _unfinished(connection: _Connection) -> int:
    # PostgreSQL uses the partial index for this query. The index contains only unfinished emails.
    row = connection.execute(
        "select count(*) from dispatcher.email_log where status in ('pending', 'sending')"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _clock_ahead(connection: _Connection) -> float:
    """How many seconds the database's clock is ahead of ours; almost 0 on the same machine."""
    before = time.time()
    row = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    after = time.time()
    assert row is not None
    return float(row[0]) - (before + after) / 2


def server_pids(servers: Servers) -> dict[str, int]:
    """The top process of each private server; empty if the environment variables set the servers."""
    pids = status(servers.folder).pids
    names = {"postgres": "postgresql", "rabbitmq": "rabbitmq"}
    return {names[name]: pid for name, pid in pids.items() if name in names}
