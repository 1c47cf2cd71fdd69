"""What goes on now, for people who watch: workers of all hosts, and how long emails take."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.store.connections import translated
from dispatcher.store.queries import query


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker of any host.

    Attributes:
        name: Host, slot, process and a nonce, with colons between.
        age_seconds: Since it began; None for one that is gone, and whose emails are about to be settled or rescued.
        in_flight: Emails under its lease.
    """

    name: str
    age_seconds: float | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the enqueue to the provider's acceptance, over the newest emails (at most 1,000, of ten minutes)."""

    emails: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float


def list_workers(connection: Connection[TupleRow]) -> list[WorkerSeen]:
    """By name. Faults are ours (see `store.connections.translated`)."""
    with translated():
        return [WorkerSeen(*row) for row in connection.execute(query("list_workers")).fetchall()]


def measure_latency(connection: Connection[TupleRow]) -> Latency | None:
    """None where nothing was sent lately. Faults are ours."""
    with translated():
        row = connection.execute(query("measure_latency")).fetchone()
    if row is None or not row[0]:
        return None
    return Latency(row[0], *row[1])
