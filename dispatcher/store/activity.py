"""What goes on now, for people who watch: workers of all hosts, and how long emails take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dispatcher.store.connections import Session
from dispatcher.store.statements import fetch_sync

MISSED_LOOKS: Final = 3
"""A host counts as silent only after its monitor missed so many looks, even if alerts are set to come sooner."""


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker of any host.

    Attributes:
        name: Host, slot, process and a nonce, with colons between.
        age_seconds: Since it began; None for one that is gone, and whose emails are about to be settled or rescued.
        in_flight: Emails under its lease.
        leases_end_in_seconds: When the last of these leases ends, negative if it has; None if there is none.
    """

    name: str
    age_seconds: float | None
    in_flight: int
    leases_end_in_seconds: float | None = None

    @property
    def host(self) -> str:
        """The host that it runs on, or ran on."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class VanishedHost:
    """A host that lost its power, its network, or its only worker.

    Attributes:
        in_flight: Emails under its leases.
        leases_end_in_seconds: When the last of these leases expires, negative if it has; None without leases.
        silent_seconds: How long its monitor has been silent; None if it is not, or if it stopped in order.
    """

    name: str
    in_flight: int
    leases_end_in_seconds: float | None
    silent_seconds: float | None = None


def find_vanished_hosts(
    workers: Iterable[WorkerSeen], silent_seconds: Mapping[str, float] = MappingProxyType({})
) -> list[VanishedHost]:
    """The hosts that have leases and no worker with a session, and those that are silent.

    Args:
        silent_seconds: By host, how long its monitor has been silent; only hosts that are silent for too long.
    """
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
    """Seconds from the enqueue to the provider's acceptance, over the newest emails (at most 1,000, of ten minutes)."""

    emails: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float


def list_workers(connection: Session) -> list[WorkerSeen]:
    """The workers of all hosts, by name."""
    return fetch_sync(connection, "list_workers", into=WorkerSeen)


def list_silent_hosts(connection: Session, *, after_seconds: float) -> dict[str, float]:
    """By host, how long its monitor has been silent; leaves out shorter silences and hosts that stopped in order."""
    rows = fetch_sync(connection, "list_presences")
    return {host: seconds for host, _, seconds in rows if seconds > after_seconds}


def measure_latency(connection: Session) -> Latency | None:
    """The latency of the newest emails; None if nothing was sent lately."""
    emails, percentiles = fetch_sync(connection, "measure_latency")[0]
    return Latency(emails, *percentiles) if emails else None
