"""Current activity, for operators: the workers of all hosts, and the latency of emails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Final

from dispatcher.domain.values import dataclass
from dispatcher.store.statements import Source, statement

MISSED_REPORTS: Final = 3
"""A host counts as silent only after its monitor missed this many reports, even if DISPATCHER_ALERT_AFTER_SECONDS is
shorter."""


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker, on any host, that has a PostgreSQL session, leases, or both.

    Attributes:
        name: The host, the slot, the process id and a random number, separated by colons.
        age_seconds: Seconds since the worker started. None if the worker has no session; recovery then takes over
            its emails.
        leases_end_in_seconds: Seconds until the worker's last lease expires, negative if it has expired; None if the
            worker has no leases.
    """

    name: str
    age_seconds: float | None
    in_flight: int
    leases_end_in_seconds: float | None = None

    @property
    def host(self) -> str:
        """The worker's host."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class VanishedHost:
    """A host that has leases but no worker with a session, or that does not report.

    It has probably lost its power, its network or its only worker.

    Attributes:
        leases_end_in_seconds: Seconds until the host's last lease expires, negative if it has expired; None if the host
            has no leases.
        silent_seconds: Seconds since the host's monitor last reported, if that is too long ago. None if the monitor
            still reports (only the workers have vanished), or if the monitor stopped in an orderly way.
    """

    name: str
    in_flight: int
    leases_end_in_seconds: float | None
    silent_seconds: float | None = None


def find_vanished_hosts(
    workers: Iterable[WorkerSeen], silent_seconds: Mapping[str, float] = MappingProxyType({})
) -> list[VanishedHost]:
    """Hosts that have leases but no worker with a session, and hosts that do not report."""
    by_host: dict[str, list[WorkerSeen]] = {}
    for worker in workers:
        by_host.setdefault(worker.host, []).append(worker)
    leasing = [
        VanishedHost(
            host,
            sum(worker.in_flight for worker in seen),
            max(worker.leases_end_in_seconds or 0.0 for worker in seen),
            silent_seconds.get(host),
        )
        for host, seen in by_host.items()
        if all(worker.age_seconds is None for worker in seen)
    ]
    return leasing + [
        VanishedHost(host, 0, None, silent_seconds[host]) for host in silent_seconds if host not in by_host
    ]


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of how long the newest sent emails waited: at most 1,000 emails of the last ten minutes.

    An email's wait begins when the email could first be sent, and ends when a provider accepts the email.
    """

    emails: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float


@statement
async def list_workers(source: Source) -> list[WorkerSeen]: ...
@statement
async def list_presences(source: Source) -> list[tuple[str, datetime, float]]: ...
@statement
async def list_shared_host_names(source: Source) -> list[str]: ...
@statement
async def measure_latency(source: Source) -> Latency | None: ...
