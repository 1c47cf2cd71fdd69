"""Sets up one measured case: database and queues, a real `dispatcher run`, and a provider's double with a ledger."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from benchmarks.doubles import Double, running_double
from dispatcher import Email, enqueue_many
from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import Servers
from dispatcher.domain.status import Status
from dispatcher.store.connections import connected
from dispatcher.store.figures import count_emails
from dispatcher.store.migrations import migrate

STALL_SECONDS = 30.0
DRAIN_SECONDS = 60.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One measured case.

    Attributes:
        prefetch: The prefetch window; None for the product's default.
        latency_ms: How long the provider's double waits before it answers.
        rate: Scheduled arrivals per second; None if all emails are enqueued before the start.
        has_faults: Workers are killed during the case.
        preload: The number of finished emails already in the tables.
        suppressed: The number of suppressed addresses. The emails go to other addresses.
        hold_seconds: How long another session of the database keeps a snapshot, from the beginning of the measured part
            on, so that vacuum cannot remove dead rows; 0 for no such session.
        sink: `python` keeps a ledger; `c` is Postfix's smtp-sink, for smtp only.
        is_templated: The emails use a provider's template, with data.
        settings: Further settings of the product, as environment variables.
    """

    provider: str
    workers: int
    emails: int
    prefetch: int | None = None
    latency_ms: float = 0.0
    rate: float | None = None
    has_faults: bool = False
    preload: int = 0
    suppressed: int = 0
    hold_seconds: int = 0
    sink: str = "python"
    is_templated: bool = False
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a case.

    Attributes:
        seconds: From the start of the first attempt until the last email is recorded.
        enqueue_per_second: The rate at which the library enqueued the emails before the run, with some hundreds of
            emails per statement.
        lost: Emails that our tables have as sent but the provider's ledger does not have, and emails that are not in
            our tables.
        duplicates: Acceptances of emails that were already accepted, from the provider's ledger.
    """

    case: Case
    emails_per_second: float
    seconds: float
    enqueue_per_second: float
    sent: int
    failed: int
    held: int
    lost: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A case whose emails are enqueued, with everything that `dispatcher run` needs.

    Attributes:
        ids: Every email's id.
        enqueue_per_second: The library's rate, with some hundreds of emails per statement.
    """

    case: Case
    folder: Path
    database_url: str
    environment: Mapping[str, str]
    double: Double
    ids: frozenset[str]
    enqueue_per_second: float

    @contextmanager
    def running(self, name: str, settings: Mapping[str, str] = MappingProxyType({})) -> Iterator[int]:
        """Start a `dispatcher run` with its own run directory, and let it drain after the block; yields its process
        id."""
        environment = {**self.environment, "DISPATCHER_RUN_DIR": str(self.folder / name), **settings}
        with _running(environment, self.folder / f"{name}.log") as pid:
            yield pid


@contextmanager
def stage(servers: Servers, case: Case, folder: Path) -> Iterator[Stage]:
    """Create a database, queues and a provider's double for one case, and enqueue the emails. Removes everything
    afterwards."""
    with database(servers) as database_url, bare_stage(servers, case, folder, database_url) as scene:
        ids, enqueue_per_second = _enqueue(database_url, case.emails)
        yield replace(scene, ids=frozenset(ids), enqueue_per_second=enqueue_per_second)


@contextmanager
def bare_stage(servers: Servers, case: Case, folder: Path, database_url: str) -> Iterator[Stage]:
    """Create queues and a provider's double for one case, on an existing database. Enqueues nothing."""
    folder.mkdir(parents=True)
    with (
        running_double(case.provider, folder, case.latency_ms, sink=case.sink) as double,
        passing_topology(servers) as topology,
    ):
        environment = {
            **os.environ,
            **double.environment,
            **settings_of(servers, database_url, topology),
            "DISPATCHER_PROVIDERS": case.provider,
            "DISPATCHER_WORKERS": str(case.workers),
            "DISPATCHER_LOG_FORMAT": "json",
            "DISPATCHER_METRICS_ADDRESS": "off",
        }
        if case.prefetch:
            environment["DISPATCHER_PREFETCH"] = str(case.prefetch)
        environment.update(case.settings)
        yield Stage(case, folder, database_url, environment, double, frozenset(), 0.0)


def settings_of(servers: Servers, database_url: str, topology: Topology) -> dict[str, str]:
    """The settings for a case's database and queues."""
    return {
        "DISPATCHER_DATABASE_URL": database_url,
        "DISPATCHER_AMQP_URL": servers.amqp_url,
        "DISPATCHER_EXCHANGE": topology.exchange,
        "DISPATCHER_QUEUE": topology.queue,
        "DISPATCHER_DLQ": topology.dlq,
    }


def measure(servers: Servers, case: Case, folder: Path, settings: Mapping[str, str] = MappingProxyType({})) -> Measured:
    """Run one case.

    Args:
        settings: Further environment variables.

    Raises:
        RuntimeError: There was no progress for half a minute, or the run failed.
    """
    with stage(servers, case, folder) as scene:
        with scene.running("run", settings):
            counts = _until_done(scene.database_url, case.emails)
        accepted = Counter({name: len(instants) for name, instants in scene.double.acceptances().items()})
        return _measured(scene, accepted, counts)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition.

    Raises:
        RuntimeError: The condition was not met in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the condition was not met within {seconds:.0f} s")
        time.sleep(0.1)


@contextmanager
def database(servers: Servers) -> Iterator[str]:
    """Create a database with our tables, and drop it afterwards; yields its URL."""
    name = f"bench_{secrets.token_hex(4)}"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        database_url = urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
        with connected(database_url) as connection:
            migrate(connection)
        try:
            yield database_url
        finally:
            administration.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@contextmanager
def passing_topology(servers: Servers) -> Iterator[Topology]:
    """Create an exchange and queues, and delete them afterwards; yields their names."""
    name = f"bench.{secrets.token_hex(4)}"
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq")
    asyncio.run(declare(servers.amqp_url, topology))
    try:
        yield topology
    finally:
        asyncio.run(_delete(servers, topology))


async def _delete(servers: Servers, topology: Topology) -> None:
    async with await open_connection(servers.amqp_url, name="benchmark clean-up") as connection:
        channel = await connection.open_channel()
        for queue in topology.queues:
            await channel.call(channel.raw.queue_delete, queue=queue)
        await channel.call(channel.raw.exchange_delete, exchange=topology.exchange)


def drafts(emails: int, prefix: str = "receipt", *, first: int = 0, is_templated: bool = False) -> list[Email]:
    """Emails like those of a shop, numbered from `first`. The prefix makes the message keys unique."""
    draft = _templated if is_templated else _written
    return [draft(number, f"{prefix}-{number}") for number in range(first, first + emails)]


def _written(number: int, message_key: str) -> Email:
    return Email(
        message_key=message_key,
        sender="Shop <shop@example.com>",
        to=f"customer{number}@example.org",
        subject=f"Your receipt {number}",
        text="Thank you for your order. It leaves our house tomorrow.\n" * 8,
    )


def _templated(number: int, message_key: str) -> Email:
    return Email(
        message_key=message_key,
        sender="Shop <shop@example.com>",
        to=f"customer{number}@example.org",
        template_id="d-receipt",
        template_data={"order": number, "name": f"Customer {number}", "leaves": "tomorrow", "total": "42.00 EUR"},
    )


def _enqueue(database_url: str, emails: int) -> tuple[set[str], float]:
    wanted = drafts(emails)
    with connected(database_url) as connection:
        began = time.perf_counter()
        answers = enqueue_many(connection, wanted)
        return {str(answer.email_id) for answer in answers}, emails / (time.perf_counter() - began)


@contextmanager
def _running(environment: Mapping[str, str], log_path: Path) -> Iterator[int]:
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "dispatcher.cli.main", "run"]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=log,
            # Ctrl-C in the terminal reaches only the benchmark, which then stops this process cleanly.
            process_group=0,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - it only makes a system call
        )
    try:
        yield process.pid
    except RuntimeError as error:
        if process.poll() is None:
            raise
        raise RuntimeError(f"`dispatcher run` ended: {error}; the end of its log:\n{_end_of(log_path)}") from error
    finally:
        code = _end(process)
    if code != 0:
        raise RuntimeError(f"`dispatcher run` ended with {code}; the end of its log:\n{_end_of(log_path)}")


def _die_with_parent() -> None:
    # If the benchmark is killed, `dispatcher run` drains and exits.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=DRAIN_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise


def _end_of(log_path: Path) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-5:])


def _until_done(database_url: str, emails: int) -> dict[Status, int]:
    with connected(database_url) as connection:
        best, moved_at = -1, time.monotonic()
        while True:
            counts = count_emails.sync(connection)
            done = sum(count for status, count in counts.items() if status not in ("pending", "sending"))
            if done >= emails:
                return counts
            if done > best:
                best, moved_at = done, time.monotonic()
            if time.monotonic() - moved_at > STALL_SECONDS:
                raise RuntimeError(f"no progress for {STALL_SECONDS:.0f} s: {done} of {emails} emails are finished")
            time.sleep(0.1)


def _measured(scene: Stage, accepted: Counter[str], counts: dict[Status, int]) -> Measured:
    with connected(scene.database_url) as connection:
        row = connection.execute(
            "select extract(epoch from max(l.sent_at) - min(a.started_at))::float8"
            " from dispatcher.email_log as l join dispatcher.every_attempt as a using (email_id)"
        ).fetchone()
        sent = connection.execute("select email_id from dispatcher.email_log where status = 'sent'")
        sent_ids = {str(email_id) for (email_id,) in sent}
        known = connection.execute("select count(*) from dispatcher.email_log").fetchone()
    assert row is not None
    assert known is not None
    return Measured(
        case=scene.case,
        emails_per_second=len(sent_ids) / row[0],
        seconds=row[0],
        enqueue_per_second=scene.enqueue_per_second,
        sent=counts[Status.SENT],
        failed=counts[Status.FAILED],
        held=counts[Status.HELD],
        lost=len(sent_ids - set(accepted)) + len(scene.ids) - known[0],
        duplicates=sum(times - 1 for times in accepted.values()),
    )
