"""Measures a case's programs, from the double's first acceptance until the last email is recorded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.double import read_acceptances
from benchmarks.doubles import Acceptances
from benchmarks.peers.processes import Programs, cpu_seconds_of
from dispatcher.dev.servers import Servers, status

START_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.1
BOOKS_POLL_SECONDS: Final = 0.5
"""PostgreSQL takes 10 to 20 ms to count 45,000 emails, which must not distort the result of the case with the most
emails."""

Books = Callable[[], tuple[int, float]]
"""Returns the number of sent emails in the database, and when the last sent email was recorded, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a case.

    Attributes:
        emails: The number of emails that are enqueued before the workers start.
        seconds: The time limit.
        kill: Send SIGKILL to the busiest worker when a third of the emails is accepted. After a kill, unfinished emails
            are not an error.
    """

    emails: int
    seconds: float
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a case of a peer or of our dispatcher.

    Attributes:
        knobs: The varied settings and their values.
        emails_per_second: The rate from the first acceptance until the last email is recorded.
        steady_per_second: The rate from the double's ledger only. It leaves out the first and the last tenth of the
            acceptances, and thereby the start.
        enqueue_per_second: The rate of the enqueueing. Peers enqueue in eight threads, one email at a time. Our library
            enqueues some hundreds of emails per statement.
        cpu_microseconds: The CPU per email of all worker processes, from the first acceptance on.
        servers_cpu_microseconds: The CPU per email of PostgreSQL, RabbitMQ and the double, if these are private.
        processes: The number of worker processes.
        missing: Emails that are not in the provider's ledger and not held.
        duplicates: Acceptances of emails that were already accepted, from the same ledger.
        unrecorded: Accepted emails that are neither recorded as sent nor held.
        held: Emails that wait for an operator because the outcome is unknown. Only our dispatcher has such emails.
    """

    name: str
    knobs: Mapping[str, int | str]
    emails: int
    killed: bool
    emails_per_second: float
    steady_per_second: float
    enqueue_per_second: float
    cpu_microseconds: float
    servers_cpu_microseconds: float
    processes: int
    missing: int
    duplicates: int
    unrecorded: int
    held: int


@dataclass(frozen=True, slots=True)
class Watched:
    """The measurements taken while the programs ran."""

    sent: int
    last_at: float
    cpu_seconds: float
    servers_cpu_seconds: float
    processes: int


def watch(
    programs: Programs, servers: Sequence[int], ledger: Path, books: Books, load: Load, dies_whole: bool = False
) -> Watched:
    """Measure until all emails are sent.

    Args:
        servers: Processes whose CPU is measured in addition to the programs'.
        ledger: The path of the double's ledger.
        dies_whole: Whether the kill, if `load` asks for one, ends a command together with its children.

    Raises:
        TimeoutError: Not all emails were sent in time; the text says how many were sent.
    """
    if not _until(lambda: bool(read_acceptances(ledger)), programs, START_SECONDS):
        raise TimeoutError(f"sent nothing within {START_SECONDS:.0f} s")
    before, servers_before, processes = programs.cpu_seconds(), cpu_seconds_of(servers), len(programs.pids())
    deadline = time.monotonic() + load.seconds
    if load.kill:
        _until(lambda: len(read_acceptances(ledger)) >= load.emails // 3, programs, load.seconds)
        programs.kill(whole=dies_whole)
    is_done = _until(lambda: books()[0] >= load.emails, programs, deadline - time.monotonic(), BOOKS_POLL_SECONDS)
    sent, last_at = books()
    if not is_done and not load.kill:
        raise TimeoutError(f"sent {sent} of {load.emails} emails within {load.seconds:.0f} s")
    return Watched(
        sent,
        last_at,
        cpu_seconds=programs.cpu_seconds() - before,
        servers_cpu_seconds=cpu_seconds_of(servers) - servers_before,
        processes=max(processes, len(programs.pids())),
    )


def server_pids(servers: Servers, double_pid: int | None) -> list[int]:
    """The processes of private servers and of the double. Processes of other servers are unknown."""
    pids = [pid for name, pid in status(servers.folder).pids.items() if name != "keeper"]
    return [*pids, *([double_pid] if double_pid else [])]


def ledger_of(folder: Path) -> Path:
    """The path of the ledger of a double that `running_double` runs in this folder."""
    return folder / "double" / "ledger.txt"


def result_of(
    name: str,
    knobs: Mapping[str, int | str],
    load: Load,
    enqueue_per_second: float,
    watched: Watched,
    ids: frozenset[str],
    acceptances: Acceptances,
    held: frozenset[str] = frozenset(),
) -> Measured:
    """The result of a case.

    Args:
        ids: The ids of all enqueued emails.
    """
    instants = [instant for times in acceptances.values() for instant in times]
    return Measured(
        name=name,
        knobs=dict(knobs),
        emails=load.emails,
        killed=load.kill,
        emails_per_second=watched.sent / (watched.last_at - min(instants)),
        steady_per_second=steady_rate(instants),
        enqueue_per_second=enqueue_per_second,
        cpu_microseconds=1e6 * watched.cpu_seconds / load.emails,
        servers_cpu_microseconds=1e6 * watched.servers_cpu_seconds / load.emails,
        processes=watched.processes,
        missing=len(ids - acceptances.keys() - held) + load.emails - len(ids),
        duplicates=len(instants) - len(acceptances),
        unrecorded=len((ids & acceptances.keys()) | held) - watched.sent,
        held=len(held),
    )


def steady_rate(instants: Sequence[float]) -> float:
    """Events per second, without the first and the last tenth of the events."""
    ordered = sorted(instants)
    tenth = len(ordered) // 10
    middle = ordered[tenth : len(ordered) - tenth]
    return (len(middle) - 1) / (middle[-1] - middle[0])


def median_rate(results: Sequence[Measured]) -> float:
    """The median of the emails per second over the repetitions."""
    return statistics.median(result.emails_per_second for result in results)


def median_steady_rate(results: Sequence[Measured]) -> float:
    """The median of the steady rates, which leave out the start and the end."""
    return statistics.median(result.steady_per_second for result in results)


def counted(connection: psycopg.Connection[tuple[object, ...]], query: str) -> Books:
    """A `Books` function that runs this query, which returns the number of sent emails and the time at which the last
    email was sent."""

    def books() -> tuple[int, float]:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        sent, last_at = row
        assert isinstance(sent, int)
        return sent, last_at if isinstance(last_at, float) else 0.0

    return books


def _until(
    condition: Callable[[], bool], programs: Programs, seconds: float, poll_seconds: float = POLL_SECONDS
) -> bool:
    """Whether the condition was met in time; restarts programs that die while it waits."""
    deadline = time.monotonic() + seconds
    while not condition():
        programs.restart_dead()
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_seconds)
    return True
