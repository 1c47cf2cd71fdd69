"""One measured case: its programs, from the first email that the provider's double accepts to the last one's record."""

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
LOOK_SECONDS: Final = 0.1
BOOKS_LOOK_SECONDS: Final = 0.5
"""To count 45,000 emails takes PostgreSQL 10 to 20 ms, which must not weigh on whoever has most of them."""

Books = Callable[[], tuple[int, float]]
"""How many emails are sent, by the database, and when the last one was recorded, unix seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a case.

    Attributes:
        emails: How many are enqueued before the workers start.
        seconds: It must be done by then.
        kill: SIGKILL to the busiest worker when a third is accepted; what is left behind then is no fault of the run.
    """

    emails: int
    seconds: float
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a case, a peer's or ours.

    Attributes:
        knobs: What was turned, and to what.
        emails_per_second: From the first acceptance to the last record.
        steady_per_second: By the double's ledger alone, without the first and the last tenth: start-up does not count.
        enqueue_per_second: By eight threads, an email at a time; ours: by the library, some hundreds per statement.
        cpu_microseconds: Per email, of all worker processes, from the first acceptance on.
        servers_cpu_microseconds: The same of PostgreSQL, RabbitMQ and the double, as far as they are our own.
        processes: How many worker processes there were.
        missing: Never accepted by the provider, by its ledger, and not held.
        duplicates: Acceptances beyond the first, by the same ledger.
        unrecorded: Accepted, and neither recorded as sent nor held.
        held: Waiting for a person, because nobody can know whether the provider has it; ours alone knows such emails.
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
    """What was seen while the programs ran."""

    sent: int
    last_at: float
    cpu_seconds: float
    servers_cpu_seconds: float
    processes: int


def watch(
    programs: Programs, servers: Sequence[int], ledger: Path, books: Books, load: Load, dies_whole: bool = False
) -> Watched:
    """Wait until everything is sent.

    Args:
        servers: Processes whose CPU is told beside the programs'.
        ledger: The double's.
        dies_whole: Where somebody is killed, it is a command with its children.

    Raises:
        TimeoutError: it was not, in time; says how far it came.
    """
    if not _until(lambda: bool(read_acceptances(ledger)), programs, START_SECONDS):
        raise TimeoutError(f"sent nothing within {START_SECONDS:.0f} s")
    before, servers_before, processes = programs.cpu_seconds(), cpu_seconds_of(servers), len(programs.pids())
    deadline = time.monotonic() + load.seconds
    if load.kill:
        _until(lambda: len(read_acceptances(ledger)) >= load.emails // 3, programs, load.seconds)
        programs.kill(whole=dies_whole)
    is_done = _until(lambda: books()[0] >= load.emails, programs, deadline - time.monotonic(), BOOKS_LOOK_SECONDS)
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
    """The processes of private servers and of the double; of servers that were named we know none."""
    pids = [pid for name, pid in status(servers.folder).pids.items() if name != "keeper"]
    return [*pids, *([double_pid] if double_pid else [])]


def ledger_of(folder: Path) -> Path:
    """Where `running_double` keeps the ledger of a double that it was given this folder for."""
    return folder / "double" / "ledger.txt"


def told(
    name: str,
    knobs: Mapping[str, int | str],
    load: Load,
    enqueue_per_second: float,
    watched: Watched,
    ids: frozenset[str],
    acceptances: Acceptances,
    held: frozenset[str] = frozenset(),
) -> Measured:
    """The figures of a case.

    Args:
        ids: Of every email that was enqueued.
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
    """Events per second between the first and the last tenth of them."""
    ordered = sorted(instants)
    tenth = len(ordered) // 10
    middle = ordered[tenth : len(ordered) - tenth]
    return (len(middle) - 1) / (middle[-1] - middle[0])


def median_rate(results: Sequence[Measured]) -> float:
    """Emails per second, over the repetitions."""
    return statistics.median(result.emails_per_second for result in results)


def median_steady_rate(results: Sequence[Measured]) -> float:
    """The same without start and end."""
    return statistics.median(result.steady_per_second for result in results)


def counted(connection: psycopg.Connection[tuple[object, ...]], query: str) -> Books:
    """Books by a query for the two figures."""

    def books() -> tuple[int, float]:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        sent, last_at = row
        assert isinstance(sent, int)
        return sent, last_at if isinstance(last_at, float) else 0.0

    return books


def _until(
    condition: Callable[[], bool], programs: Programs, seconds: float, look_seconds: float = LOOK_SECONDS
) -> bool:
    """Whether it came true in time; meanwhile what died is started again."""
    deadline = time.monotonic() + seconds
    while not condition():
        programs.look()
        if time.monotonic() > deadline:
            return False
        time.sleep(look_seconds)
    return True
