"""The hosts that run the dispatcher, with their processes; and which hosts have vanished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dispatcher.config import Settings
from dispatcher.domain.retry import longest_recovery_seconds
from dispatcher.domain.values import dataclass
from dispatcher.store.figures import MISSED_REPORTS, HostReport, WorkerSeen


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a host.

    Attributes:
        name: Such as `worker 0`, `relay` or `monitor`.
        state: `up`, `starting`, `stopping`, `failing` (the process could not start, because of `reason`), or `dead`
            (the worker has leases, but no database session).
        in_flight: Emails under the worker's leases; None for other processes.
        restarts: How many times the process ended by itself; None if its host does not report this number.
    """

    name: str
    pid: int | None
    state: str
    age_seconds: float | None
    in_flight: int | None
    restarts: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """A host. It has vanished if it has leases but no worker with a session, or if it neither reports nor has a worker:
    it has probably lost its power, its network or its only worker.

    Attributes:
        reported_seconds: Seconds since the host's monitor last reported; None if no monitor has reported, or if it
            stopped in an orderly way.
        silent_seconds: The same, if that is too long ago; otherwise None.
        in_flight: Emails under the leases of this host's workers.
        settled_in_seconds: If the host has vanished: within how many seconds other hosts recover its leased
            emails. None if the host has not vanished, or has no leases.
    """

    name: str
    version: str | None
    reported_seconds: float | None
    silent_seconds: float | None
    is_vanished: bool
    in_flight: int
    settled_in_seconds: float | None
    processes: Sequence[Process]


def hosts_of(workers: Sequence[WorkerSeen], reports: Sequence[HostReport], settings: Settings) -> list[Host]:
    """All hosts: the vanished hosts by name, then all other hosts by name. Of a host, the newest report is first."""
    longest_seconds = max(settings.alert_after_seconds, MISSED_REPORTS * settings.dlq_probe_seconds)
    found = []
    for name in {*(report.host for report in reports), *(worker.host for worker in workers)}:
        seen = [worker for worker in workers if worker.host == name]
        reported = [report for report in reports if report.host == name]
        last = reported[0] if reported else None
        silent_seconds = last.age_seconds if last and last.age_seconds > longest_seconds else None
        is_vanished = all(worker.age_seconds is None for worker in seen) and bool(seen or silent_seconds is not None)
        end = max(0.0, *[worker.leases_end_in_seconds or 0.0 for worker in seen]) if is_vanished and seen else None
        found.append(
            Host(
                name,
                last.version if last else None,
                last.age_seconds if last else None,
                silent_seconds,
                is_vanished,
                sum(worker.in_flight for worker in seen),
                None if end is None else end + longest_recovery_seconds(settings.lease_seconds),
                _processes(reported, seen),
            )
        )
    return sorted(found, key=lambda host: (not host.is_vanished, host.name))


def _processes(reports: Sequence[HostReport], workers: Sequence[WorkerSeen]) -> list[Process]:
    """The processes of one host: those that the host reports, and unreported workers that have a session or leases."""
    by_pid = {int(pid) if pid.isdigit() else None: worker for worker in workers for _, _, pid in [worker.parts]}
    found = []
    for report in reports:
        for each in report.processes or ():
            seen = by_pid.pop(each["pid"], None) if each["role"] == "worker" else None
            found.append(_process(each, seen, report.age_seconds))
    for pid, worker in by_pid.items():
        slot = worker.parts[1].removeprefix("w")
        state = "dead" if worker.age_seconds is None else "up"
        found.append(Process(f"worker {slot}", pid, state, worker.age_seconds, worker.in_flight, None))
    return found


def _process(row: Mapping[str, Any], seen: WorkerSeen | None, report_seconds: float) -> Process:
    is_worker = row["role"] == "worker"
    age_seconds = row["age_seconds"]
    if row["is_ending"]:
        state = "stopping"
    elif row["is_up"]:
        state = "up"
    else:
        state = "failing" if row["reason"] else "starting"
    return Process(
        f"worker {row['number']}" if is_worker else row["role"],
        row["pid"],
        state,
        None if age_seconds is None else age_seconds + max(0.0, report_seconds),
        (seen.in_flight if seen else 0) if is_worker else None,
        row["restarts"],
        row["reason"] if state == "failing" else "",
    )
